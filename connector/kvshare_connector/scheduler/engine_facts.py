"""Facts of the engine: from vLLM's resolved configuration to plain values, and the canary of its block hashes.

Whatever changes the bytes of a cache, or the meaning of a block hash, and that no rank can see, is gathered here.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvshare_connector import compat
from kvshare_connector.scheduler.weights import WeightsUnreadableError, weight_files, weights_digest
from kvshare_layout.facts import EngineFacts
from kvshare_layout.fingerprint import canonical_json

logger = logging.getLogger(__name__)

#: Fields of a model configuration that say where it came from, not what it computes.
_NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})
#: Rotary embeddings whose values do not depend on the context length that an engine is started with.
_STATIC_ROPE = frozenset({
    "default", "linear", "yarn", "llama3", "mrope", "proportional", "deepseek_yarn", "deepseek_llama_scaling",
})  # fmt: skip
#: Speculative decoding without layers of its own. What a rejected draft leaves in a cache is never saved, so such
#: engines have the same blocks as those that do not speculate.
_DRAFTS_WITHOUT_A_CACHE = frozenset({"ngram", "ngram_gpu", "suffix"})
#: Settings of an engine that decide what the model sees of a picture or a film, which block hashes know by its own
#: bytes and by what the request says.
_MEDIA_SETTINGS = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)  # fmt: skip
#: Load formats that read no safetensors, whatever else lies there.
_PICKLED = frozenset({"pt", "npcache"})
_CANARY_BLOCK = tuple(range(16))


def engine_facts(vllm_config: Any, kv_cache_config: Any, problem: str, identified: tuple[str, str]) -> EngineFacts:
    """Everything that the scheduler process knows about its engine.

    Args:
        vllm_config: vLLM's resolved configuration.
        kv_cache_config: vLLM's cache configuration.
        problem: what is known to keep the engine from caching, ``Reason: sentence``.
        identified: what ``identify_weights`` found.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    canary = hash_canary(algorithm)
    weights, weights_problem = identified
    speculative = vllm_config.speculative_config
    return EngineFacts(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=getattr(parallel, "decode_context_parallel_size", 1),
        pcp=getattr(parallel, "prefill_context_parallel_size", 1),
        kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        hidden_layers=model.get_total_num_hidden_layers(),
        cache_groups=len(kv_cache_config.kv_cache_groups),
        block_tokens=cache.block_size,
        hash_block_tokens=compat.hash_block_tokens(vllm_config, kv_cache_config),
        hash_algorithm=algorithm,
        hash_reproducible=canary is not None,
        speculates=speculative is not None,
        draft_drop=bool(speculative is not None and speculative.use_eagle()),
        identity={
            "model_config": _model_digest(model.hf_config),
            "weights": weights,
            "rope_length": model.max_model_len if not _rope_types(_config_json(model.hf_config)) <= _STATIC_ROPE else 0,
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(cache.cache_dtype),
            "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
            "quantization": str(model.quantization or "none"),
            "hash_scheme": compat.hash_scheme(),
            "hash_canary": canary or "random",
            "speculative": _speculative(speculative),
            **_state_dtypes(kv_cache_config),
            **_eight_bits(str(cache.cache_dtype)),
            **_media(model),
            **_choices(model),
        },
        weights_problem=weights_problem,
        problem=problem or compat.version_problem() or _combination_problem(vllm_config),
        instance=uuid.uuid4().hex,
    )


def _combination_problem(vllm_config: Any) -> str:
    """Combinations in which the engine would never finish our saves or confirm our loads, or would move its caches."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "PrefixCachingOff: prefix caching is turned off, start the engine with --enable-prefix-caching"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return (
            "SleepMode: sleep mode gives the caches other memory while the store still knows the old one; start the "
            "engine without --enable-sleep-mode to cache"
        )
    pp, speculative = vllm_config.parallel_config.pipeline_parallel_size, vllm_config.speculative_config
    if pp > 1 and speculative is not None and not getattr(vllm_config, "use_v2_model_runner", False):
        return (
            "PipelineWithDraft: pipeline parallelism with speculative decoding, whose non-last ranks are never "
            "finalised by this model runner; use one of the two"
        )
    return ""


def _state_dtypes(kv_cache_config: Any) -> dict[str, str]:
    """Types of recurrent states, which round what later layers cache; nothing for models without states."""
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    ]
    found = {
        "+".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        for spec in specs
        if any(cls.__name__ == "MambaSpec" for cls in type(spec).__mro__)
    }
    return {"state_dtypes": ",".join(sorted(found))} if found else {}


def _eight_bits(cache_dtype: str) -> dict[str, str]:
    """What ``fp8`` means here, where it is not what it means nearly everywhere.

    The same byte is half as much in the form of some accelerators (``float8_e4m3fnuz``), and nothing else tells their
    caches from those of others: to vLLM both are bytes of ``fp8``.
    """
    if not cache_dtype.startswith("fp8"):
        return {}
    form = compat.eight_bit_form()
    return {"fp8": form} if form != "float8_e4m3fn" else {}


def _choices(model: Any) -> dict[str, str]:
    """What the command line makes of equal weights and configurations; nothing for an engine that chooses nothing.

    Another implementation of a model may order the channels of a head in another way, as vLLM's and Transformers' do
    for Llama 4, and a layer that is not quantised computes other values.
    """
    found: dict[str, str] = {}
    if model.using_transformers_backend():
        found["model_implementation"] = "transformers"
    if overrides := getattr(model, "model_class_overrides", None):
        found["model_classes"] = canonical_json(dict(overrides)).decode()
    if (quantization := getattr(model, "quantization_config", None)) is not None:
        found["quantization_settings"] = repr(quantization)
    return found


def _media(model: Any) -> dict[str, str]:
    """How media become embeddings, as far as the engine's settings and the model's files say it; nothing for text."""
    config = getattr(model, "multimodal_config", None)
    if config is None:
        return {}
    settings = {name: value for name in _MEDIA_SETTINGS if (value := getattr(config, name, None))}
    if "video_pruning_rate" in settings:
        settings["video_pruning_method"] = getattr(config, "video_pruning_method", None)
    digest = hashlib.sha256(canonical_json(_without_origin(settings)))
    try:
        for path in sorted(_model_directory(model).glob("*processor_config.json")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    except (WeightsUnreadableError, OSError) as error:
        logger.info("the settings of the model's processors are not known: %s", error)  # nor are its weights then
    return {"media": digest.hexdigest()}


def _config_json(hf_config: Any) -> Any:
    """The model's configuration after all overrides, as plain values."""
    return json.loads(hf_config.to_json_string(use_diff=False)) if hasattr(hf_config, "to_json_string") else {}


def _model_digest(hf_config: Any) -> str:
    """Digest of the model's configuration after all overrides."""
    return hashlib.sha256(canonical_json(_without_origin(_config_json(hf_config)))).hexdigest()


def _rope_types(value: Any) -> set[str]:
    """All kinds of rotary embeddings named in a configuration.

    Some, such as longrope, choose their factors by the context length of the engine, so that two engines with equal
    weights and configurations write different keys. Models with several types of layers have one for each type.
    """
    if isinstance(value, list):
        return set().union(*map(_rope_types, value))
    if not isinstance(value, Mapping):
        return set()
    found = set().union(*map(_rope_types, value.values()))
    rope = value.get("rope_parameters") or value.get("rope_scaling")
    if isinstance(rope, Mapping):
        for one in (rope, *(by_type for by_type in rope.values() if isinstance(by_type, Mapping))):
            kind = one.get("rope_type") or one.get("type")
            found |= {str(kind)} if kind else set()
    return found


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_origin(v) for k, v in value.items() if k not in _NOT_IDENTITY}
    if isinstance(value, list):
        return [_without_origin(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else repr(value)


def identify_weights(vllm_config: Any) -> tuple[str, str]:
    """Digest of the weights, and why there is none. Reads files, which may take seconds."""
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format == "dummy":
        return "", "the weights are random (load format dummy), real weights expected: no other engine has the same"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "", (
            "weights are sent into the running engine (weight transfer is configured), so files do not say what its "
            "caches are computed with: engines whose weights change keep to themselves"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "", (
            "KV scales are computed by each engine at run time (--calculate-kv-scales), so equal weights do not give "
            "equal cache bytes: use a checkpoint with scales"
        )
    try:
        directory = _model_directory(vllm_config.model_config)
        pickled = load_format in _PICKLED
        return weights_digest(weight_files(directory, pickled=pickled) if directory.is_dir() else [directory]), ""
    except (WeightsUnreadableError, OSError, ValueError) as error:
        return "", f"the weights cannot be identified: {error}"


def _model_directory(model: Any) -> Path:
    """Where the weights are: the model argument itself, or its snapshot in the download cache."""
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise WeightsUnreadableError(f"no local files of {model.model} found ({type(error).__name__})") from error


def _speculative(config: Any) -> str:
    """What a draft model adds to the caches: nothing where drafts come from the text itself."""
    if config is None or config.method in _DRAFTS_WITHOUT_A_CACHE:
        return "none"
    draft = getattr(config, "draft_model_config", None)
    digest = _model_digest(draft.hf_config) if draft is not None else ""
    return f"{config.method}:{digest}"


def hash_canary(algorithm: str) -> str | None:
    """Digest of the hashes that this process gives to a plain, a salted, a LoRA and a multimodal chain.

    Two processes with equal canaries give equal block hashes. None when the hashes are random.
    """
    function = get_hash_fn_by_name(algorithm)
    start = none_hash(algorithm)
    if start is None:
        return None
    requests = (
        _stub(),
        _stub(cache_salt="salt"),
        _stub(lora_request=SimpleNamespace(lora_name="salt", lora_path="/adapter")),
        _stub(mm_features=[_stub_image()]),
    )
    digest = hashlib.sha256()
    for request in requests:
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, len(_CANARY_BLOCK), 0)
        first = kv_cache_utils.hash_block_tokens(function, start, _CANARY_BLOCK, extra)
        second = kv_cache_utils.hash_block_tokens(function, first, _CANARY_BLOCK, None)
        digest.update(bytes(first) + bytes(second))
    return digest.hexdigest()[:32]


def none_hash(algorithm: str) -> bytes | None:
    """The hash of an empty prefix that this process will use; None when it is random."""
    if os.environ.get("PYTHONHASHSEED") == "random":
        return None
    function = get_hash_fn_by_name(algorithm)
    seed = compat.none_hash_seed(function)
    return None if seed is None else bytes(function(seed))


def _stub(**given: Any) -> Any:
    """A request as far as hashing looks at it."""
    base: dict[str, Any] = {"mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(**{**base, **given})


def _stub_image() -> Any:
    position = SimpleNamespace(offset=2, length=4)
    return SimpleNamespace(identifier="image", mm_hash="image", mm_position=position)
