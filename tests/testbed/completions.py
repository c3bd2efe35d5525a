"""Talking to a vLLM server: completions with token ids, metrics, health. Used for processes and pods alike."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt.

    Attributes:
        token_ids: the generated tokens.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them the server did not have to compute.
        margin: where asked with ``TWO_LIKELIEST``, the smallest difference of the logarithms of the probabilities of
            the two likeliest tokens at a place of the answer.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    margin: float = math.inf


TWO_LIKELIEST: Mapping[str, object] = {"logprobs": 2, "return_tokens_as_token_ids": True}


class ServerError(Exception):
    """A server refused a request; the text has its answer."""


@dataclass(frozen=True)
class Server:
    """Where a vLLM server listens, for example `http://127.0.0.1:8000`."""

    url: str

    def healthy(self) -> bool:
        """Whether the server answers and is ready."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        timeout: float = 300,
        extra: Mapping[str, object] | None = None,
        client: httpx.Client | None = None,
    ) -> Answer:
        """Complete a prompt greedily, ignoring end-of-text.

        Args:
            prompt: token ids.
            max_tokens: how many tokens to generate.
            timeout: seconds to wait.
            extra: more fields of the request.
            client: keeps its connections, for many requests; a new one when None.

        Raises:
            ServerError: if the server answers anything but 200.
        """
        body: dict[str, object] = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **(extra or {}),
        }
        try:
            post = httpx.post if client is None else client.post
            response = post(f"{self.url}/v1/completions", json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} did not answer: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise ServerError(f"{self.url} answered {response.status_code}: {response.text[:2000]}")
        answer = response.json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(
            token_ids=tuple(answer["choices"][0]["token_ids"]),
            prompt_tokens=answer["usage"]["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            margin=_margin((answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or []),
        )

    def reset_cache(self, *, external: bool = False) -> bool:
        """Empty the server's prefix cache; needs `VLLM_SERVER_DEV_MODE=1`.

        Args:
            external: whether the connector's cache is emptied too.

        Returns:
            whether it worked; blocks in use prevent it.
        """
        url = f"{self.url}/reset_prefix_cache?reset_external={str(external).lower()}"
        response = httpx.post(url, timeout=60)
        response.raise_for_status()
        return bool(response.json()["success"])

    def metrics(self) -> dict[str, float]:
        """The server's metrics, one entry for each sample: `name{label="value",...}` -> value."""
        response = httpx.get(f"{self.url}/metrics", timeout=30)
        response.raise_for_status()
        return parse_metrics(response.text)

    def metric(self, name: str) -> float:
        """The sum of a metric over all its labels; 0 when the server does not have it."""
        return sum(value for sample, value in self.metrics().items() if sample.split("{")[0] == name)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format as `name{labels}` -> value; comments and unreadable lines are left out."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        found = re.match(r"([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)", line)
        if found:
            with contextlib.suppress(ValueError):
                samples[found[1]] = float(found[2])
    return samples


def _margin(places: Sequence[Mapping[str, float]]) -> float:
    ordered = [sorted(place.values(), reverse=True) for place in places]
    return min((two[0] - two[1] for two in ordered), default=math.inf)
