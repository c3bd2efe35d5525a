"""What an installation decides for all pods: images, the report endpoint, versions.

A value object; filled from the process's settings by the webhook, and from flags by the command line.
"""

from __future__ import annotations

import dataclasses

KNOWN_IMAGES = (r"(^|/)vllm/vllm-openai(-[a-z0-9]+)?(:|@|$)", r"(^|/)vllm-openai(-[a-z0-9]+)?(:|@|$)")
"""Image references whose ENTRYPOINT starts vLLM's server."""


@dataclasses.dataclass(frozen=True)
class InjectionSettings:
    """Settings of the injection.

    Attributes:
        connector_image: payload image where the pool names none.
        image_pull_policy: for the payload's init container or image volume; empty leaves the default.
        image_pull_secrets: added to pods that get the payload image.
        report_url: where members report; empty injects nothing for reports.
        report_ca: CA certificates of the report endpoint, PEM.
        server_version: (major, minor) of the cluster, None when it cannot be read.
        known_images: regular expressions, see KNOWN_IMAGES.
    """

    connector_image: str = ""
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    report_url: str = ""
    report_ca: str = ""
    server_version: tuple[int, int] | None = None
    known_images: tuple[str, ...] = KNOWN_IMAGES
