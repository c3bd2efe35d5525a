"""Which steps each use of the test bed needs, in order. Slow downloads and builds come after quick checks."""

from collections.abc import Callable, Sequence

from testbed.prepare import debian, go_programs, images, python_environment
from testbed.prepare.step import Step


def fast() -> list[Step]:
    """For tests that need Python packages only."""
    needed = python_environment.pip_packages()
    before = [debian.packages(needed)] if needed else []
    return [*before, python_environment.uv(), python_environment.environment()]


def apiserver() -> list[Step]:
    """For contract tests on a kube-apiserver and of the chart."""
    builds = (
        *go_programs.API_SERVER_BUILDS,
        *go_programs.CONTROLLER_BUILDS,
        *go_programs.HELM_BUILDS,
        *go_programs.GROUP_BUILDS,
        *go_programs.MONITORING_BUILDS,
    )
    return [*fast(), go_programs.go(), *_builds(builds)]


def engine() -> list[Step]:
    """For engines and Mooncake as processes."""
    # etcd stands behind replicated masters.
    steps = [*fast(), go_programs.go(), *_builds(go_programs.API_SERVER_BUILDS[:1])]
    return _with_debian(debian.ENGINE_PACKAGES, steps)


def node() -> list[Step]:
    """For the one-node cluster, the demo and the end-to-end tests: everything."""
    steps = [
        *fast(),
        go_programs.go(),
        *_builds(go_programs.ALL_BUILDS),
        images.base_image(),
        images.image(images.PAUSE, go_programs.program("pause").parent),
        *(images.image(wanted) for wanted in (images.ENGINE, *images.PRODUCT_IMAGES)),
    ]
    return _with_debian((*debian.API_SERVER_PACKAGES, *debian.ENGINE_PACKAGES, *debian.NODE_PACKAGES), steps)


def versions() -> list[Step]:
    """For other versions of vLLM and Kubernetes, which tests build themselves: what stays the same beside them."""
    return _with_debian((*debian.API_SERVER_PACKAGES, *debian.ENGINE_PACKAGES), apiserver())


def existing_cluster() -> list[Step]:
    """For a demo on somebody's own cluster."""
    return [*fast(), go_programs.go(), *_builds((*go_programs.API_SERVER_BUILDS[2:], *go_programs.HELM_BUILDS))]


PLANS: dict[str, Callable[[], list[Step]]] = {
    "fast": fast,
    "apiserver": apiserver,
    "engine": engine,
    "node": node,
    "versions": versions,
    "existing-cluster": existing_cluster,
}


def _with_debian(names: Sequence[str], steps: Sequence[Step]) -> list[Step]:
    wanted = tuple(dict.fromkeys((*names, *python_environment.pip_packages())))
    rest = [step for step in steps if not step.name.startswith("Debian packages")]
    return [debian.packages(wanted), *rest]


def _builds(builds: Sequence[go_programs.Build]) -> list[Step]:
    return [go_programs.build_step(build) for build in builds]
