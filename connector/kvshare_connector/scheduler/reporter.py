"""Reporter: tells the operator what this member does. It may fail in any way without touching the engine.

One HTTPS POST per start and change of verdict, from a thread of its own, with a projected service-account token.
"""

import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from kvshare_layout.config import ConnectorConfig
from kvshare_layout.reports import MemberReport, to_json

logger = logging.getLogger(__name__)

#: Seconds to wait before each attempt: a webhook that restarts must not lose a report.
ATTEMPTS = (0.0, 2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TIMEOUT_SECONDS = 10.0


class Reporter:
    """Posts the newest report until it is accepted, refused for good, or replaced by a newer one."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._number = 0
        self._lock = threading.Lock()

    def post(self, report: MemberReport) -> None:
        """Send a report in the background; does nothing without a report URL."""
        if not self._config.report_url:
            return
        with self._lock:
            self._number += 1
            number = self._number
        threading.Thread(target=self._deliver, args=(report, number), name="kvshare-report", daemon=True).start()

    def _deliver(self, report: MemberReport, number: int) -> None:
        last = ""
        for pause in ATTEMPTS:
            time.sleep(pause)
            if number != self._number:
                return
            try:
                self._send(to_json(report))
                logger.info("the operator has stored the report: %s, %s", report.verdict, report.reason)
                return
            except urllib.error.HTTPError as error:
                text = error.read(500).decode(errors="replace").strip()
                if error.code in (400, 413, 422):
                    logger.warning(
                        "the operator refused the report, the pod stays unreported; sharing is not affected (%s): %s",
                        error.code, text,
                    )  # fmt: skip
                    return
                last = f"{error.code} {text}"
            except Exception as error:  # a report is never worth more than a log line
                last = str(error) or type(error).__name__
            if pause == ATTEMPTS[0]:
                logger.info("the report was not delivered at once and is tried again: %s", last)
        logger.warning(
            "the report was not delivered to %s, the pod stays unreported; sharing is not affected. Look at the "
            "network policy and the webhook's log; the last answer was: %s", self._config.report_url, last,
        )  # fmt: skip

    def _send(self, body: bytes) -> None:
        url = self._config.report_url
        if not url.startswith("https://"):
            raise ValueError(f"report URL {url!r} given, an https:// address expected")
        # Both files are read anew each time: the kubelet rotates the token, the operator the CA.
        context = ssl.create_default_context(cafile=self._config.report_ca_file or None)
        headers = {"Content-Type": "application/json"}
        if self._config.report_token_file:
            headers["Authorization"] = "Bearer " + Path(self._config.report_token_file).read_text().strip()
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context):
            pass
