"""`helm test` without a kubelet: its program, arguments and permissions against a real API server and webhook."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helm_chart import one, rendered
from installed import Installation, bare_api, installation, until
from pods import Json

pytestmark = pytest.mark.apiserver


def run_test(place: Installation, objects: list[Json]) -> subprocess.CompletedProcess[str]:
    """Make what the hook makes, run its container's program as its account, and take it away again."""
    hooks = [thing for thing in objects if thing["metadata"]["name"] == "kvshare-test"]
    for thing in hooks:
        if thing["kind"] != "Pod":
            place.kubectl.within(thing["metadata"]["namespace"]).apply(thing)
    arguments = one(objects, "Pod", "kvshare-test")["spec"]["containers"][0]["args"]
    return subprocess.run(
        [sys.executable, "-m", "kvshare_operator", *arguments],
        env=place.environment("kvshare-test"), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_test_passes_while_the_webhook_answers_and_fails_when_it_does_not() -> None:
    """The hook's own permission is enough; nothing is stored; the failure says where to look."""
    objects = rendered("watchNamespaces={team}")
    with bare_api("team") as (api, folder), installation(api, folder, objects) as place:
        place.start("controller")
        until(lambda: bool(api.kubectl.within("kvshare-system").list("secrets")), "certificates are issued")
        place.mount_secret("kvshare-webhook-certificates")
        place.start("webhook")
        place.wait_until_ready()
        passed = run_test(place, objects)
        assert (passed.returncode, "and it answers" in passed.stdout) == (0, True), passed.stderr
        assert api.kubectl.within("team").list("pods") == []
        place.stop()
        failed = run_test(place, objects)
        assert (failed.returncode, "did not reach the webhook" in failed.stderr) == (1, True), failed.stdout
        api.kubectl.within("team").delete("role", "kvshare-test")
        refused = subprocess.run(
            [sys.executable, "-m", "kvshare_operator", "dry-run", "--namespace", "team"],
            env=place.environment("kvshare-test"), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (refused.returncode, "forbidden" in refused.stderr) == (1, True), refused.stderr
