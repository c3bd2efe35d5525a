"""Apart: which requests must never use the shared cache, because their block hashes do not say what they stand for.

Pure. A block hash covers tokens, cache salt, media and adapter. Tokens and salts are what they are, and media enter by
the digest of their content, so equal hashes mean equal values in every pod. Two things enter by a name only:

* A LoRA adapter, by name and path. Two pods may have different adapters under one name, and one pod may load another
  one from the same path later, at a moment that the scheduler does not see. No digest that is taken beside the engine
  proves which content the engine computed with, so these requests are kept apart.
* Media for which the client gave an identifier of its own instead of letting the engine hash the content.

And the tokens of one sort of request change under its hashes: a session whose input is streamed takes its last token
back when more input comes. vLLM before 0.32 keeps the hash of a block that this token had completed, and a step that
was under way has put the token into the recurrent states, which nothing takes back.
"""

import re
from typing import Any

#: What vLLM's hashers give: hexadecimal digests of 32 or 64 bytes.
#: The word for sessions with streamed input.
STREAMED = "streamed_input"
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")


def kept_apart(request: Any) -> str:
    """Why a request never uses the shared cache, a word for the metric, or an empty string.

    Args:
        request: the engine's request (``lora_request``, ``mm_features``, ``streaming_queue``).
    """
    if request.lora_request is not None:
        return "lora"
    if getattr(request, "streaming_queue", None) is not None:
        return STREAMED
    features = getattr(request, "mm_features", None) or ()
    if any(not _DIGEST.fullmatch(str(feature.identifier)) for feature in features):
        return "media_identifier"
    return ""
