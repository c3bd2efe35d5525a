"""The table of reason codes: trigger, message, remedy. The only source of all three.

Why this exists: a reason code is part of the API (record annotation, condition, warning, metric label,
documentation anchor), so there are few of them, they are stable, and each says what to do. Code never
writes a reason's text itself: it names a row and gives the facts that the row's template asks for.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Reason:
    """One row of the table.

    ``message`` and ``remedy`` are templates for ``str.format``. ``ours`` marks trouble on the operator's
    side: it never denies a pod, whatever the pool's ``onConflict`` says.
    """

    code: str
    trigger: str
    message: str
    remedy: str
    ours: bool = False


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why something was not done: a reason code with its text filled in."""

    code: str
    message: str
    remedy: str
    ours: bool = False

    def sentence(self) -> str:
        """Return cause and remedy as one line for warnings, conditions and denials."""
        return f"{self.code}: {self.message} {self.remedy}"


_ROWS: Final = (
    Reason(
        "PoolNotFound",
        "No such pool in the pod's namespace, after a live look-up.",
        "there is no KVSharePool {pool!r} in namespace {namespace!r}.",
        "Create the pool, or correct the annotation kvshare.dev/pool, then restart the pod.",
        ours=True,
    ),
    Reason(
        "PoolNotReady",
        "The pool exists but does not resolve to a configuration.",
        "pool {pool!r} cannot be used yet: {problem}.",
        "Correct the pool (kubectl describe kvsharepool {pool}), then restart the pod.",
        ours=True,
    ),
    Reason(
        "InternalError",
        "A fault of the operator itself.",
        "the operator failed while it looked at this pod ({problem}).",
        "The pod starts as it was written; please report this with the operator's log.",
        ours=True,
    ),
    Reason(
        "ContainerAmbiguous",
        "Several containers could be the engine.",
        "containers {containers} could each run vLLM.",
        "Set the annotation kvshare.dev/container to the right one.",
    ),
    Reason(
        "ContainerNotFound",
        "No container could be the engine, or the named one does not exist.",
        "{problem}.",
        "Set the annotation kvshare.dev/container to the container that runs vLLM.",
    ),
    Reason(
        "NoCommand",
        "The container has neither command nor args.",
        "container {container!r} has neither command nor args, so there is nothing to append flags to.",
        "Write the command (for example `vllm serve MODEL`) in the pod template, or give `args` and set the "
        "annotation kvshare.dev/entrypoint: forwards-args.",
    ),
    Reason(
        "EntrypointUnknown",
        "Only args, and an image whose ENTRYPOINT is not known to run vLLM.",
        "container {container!r} has no command, and the ENTRYPOINT of image {image!r} is not known.",
        "Write the command, or set the annotation kvshare.dev/entrypoint: forwards-args if the image passes "
        "its arguments to vLLM.",
    ),
    Reason(
        "UnknownLauncher",
        "The command starts a program that is not known to run vLLM.",
        "container {container!r} starts {program!r}, and what that does with further arguments is not known.",
        "Start vLLM directly (`vllm serve ...`); a program that hands its arguments on to vLLM may be started by a "
        "line of shell in the pod template: sh -c 'exec PROGRAM ... $KVSHARE_VLLM_ARGS', the variable unquoted.",
    ),
    Reason(
        "ShellWrapper",
        "A shell script that does not pass our flags on.",
        "container {container!r} runs a shell script, and {problem}.",
        "Put $KVSHARE_VLLM_ARGS, without quotes, among vLLM's arguments: vllm serve ... $KVSHARE_VLLM_ARGS",
    ),
    Reason(
        "FlagConflict",
        "A flag that the pool owns is already there, or a flag replaces the connector.",
        "container {container!r} already sets {flag}{problem}.",
        "Remove it, because the pool sets it; for another connector see connector.onExistingConnector of the pool: "
        "Compose runs beside it, Replace takes the place of vLLM's MooncakeStoreConnector.",
    ),
    Reason(
        "EnvConflict",
        "A variable that we set has another value, or comes by reference.",
        "container {container!r} sets the variable {variable}{problem}.",
        "Remove the variable: the webhook sets it. A PYTHONPATH of your own may stay as a literal value, and the "
        "image's own goes into the annotation kvshare.dev/image-pythonpath.",
    ),
    Reason(
        "SeedConflict",
        "PYTHONHASHSEED is random.",
        "PYTHONHASHSEED is 'random' in container {container!r}, so no two pods agree on a block's hash.",
        "Remove PYTHONHASHSEED, or give every member of the pool the same number.",
    ),
    Reason(
        "VolumeConflict",
        "A volume name, init container or mount path that we need is taken.",
        "{problem}.",
        "Rename the volume or container, or mount it elsewhere: names that start with kvshare- and the paths "
        "/opt/kvshare and /var/run/kvshare belong to KVShare.",
    ),
    Reason(
        "ModelMismatch",
        "The model argument or revision is not the pool's.",
        "container {container!r} serves {given}, the pool is for {expected}.",
        "Use the pool of that model, or add the path to the pool's model.paths if it holds the same weights; a "
        "revision of the pool has to stand in --revision.",
    ),
    Reason(
        "TPUnknown",
        "The tensor-parallel size cannot be read from the pod.",
        "the tensor-parallel size of container {container!r} cannot be read: {problem}.",
        "Set the annotation kvshare.dev/tensor-parallel-size, or write --tensor-parallel-size with a number.",
    ),
    Reason(
        "TPNotInPool",
        "The tensor-parallel size is not listed for the pod's role.",
        "tensor-parallel size {given} is not listed in pool {pool!r} for role {role} (listed: {expected}).",
        "Add {given} to the pool's tensorParallelSizes, or start the engine with a listed size.",
    ),
    Reason(
        "PPMismatch",
        "The pipeline-parallel size is not listed, or cannot be read.",
        "pipeline-parallel size {given} is not listed in pool {pool!r} (listed: {expected}).",
        "Add it to the pool's pipelineParallelSizes, or start the engine with a listed size.",
    ),
    Reason(
        "ContextParallel",
        "Context parallelism splits tokens over ranks.",
        "container {container!r} sets {flag} {given}: with context parallelism a block's tokens are spread "
        "over ranks and cannot be shared.",
        "Remove {flag}, or do not opt this pod in.",
    ),
    Reason(
        "MultiNodeUnsupported",
        "One engine over several pods by vLLM's own --nnodes.",
        "container {container!r} sets --nnodes {given}: the pods of one engine are not known to each other here, and "
        "a connector in some of them only would stop it.",
        "Let Ray join the pods (see the page about LeaderWorkerSet), or do not opt this group in.",
    ),
    Reason(
        "BlockMismatch",
        "Another block size than the pool's.",
        "container {container!r} sets --block-size {given}, the pool's cache.blockSizeTokens is {expected}.",
        "Remove the flag, or use a pool with that block size.",
    ),
    Reason(
        "MemoryTooSmall",
        "The container's memory limit does not hold KVShare's staging memory.",
        "KVShare needs {needed} of host memory in container {container!r} ({ranks} rank(s) of {each}), and its memory "
        "limit is {limit}.",
        "Raise the limit, or lower connector.stagingMemoryPerRank of the pool.",
    ),
    Reason(
        "DtypeMismatch",
        "Another KV-cache dtype than the pool's.",
        "container {container!r} sets --kv-cache-dtype {given}, the pool's cache.dtype is {expected}.",
        "Make both equal, or use another pool.",
    ),
    Reason(
        "RoleInvalid",
        "The role annotation has an unknown value.",
        "annotation kvshare.dev/role is {given!r}.",
        "Allowed are prefill, decode and both.",
    ),
    Reason(
        "AnnotationInvalid",
        "Another annotation has an unknown value.",
        "annotation {annotation} is {given!r}.",
        "Allowed: {expected}.",
    ),
    Reason(
        "AnnotationMisplaced",
        "(inject) An annotation of ours stands where no pod gets it.",
        "{places} of {owner} has no effect: only annotations of the pod template reach a pod.",
        "Move the kvshare.dev annotations to {expected}.",
    ),
    Reason(
        "ManifestInvalid",
        "(inject) The manifest does not have the shape of a pod; the API server would refuse it.",
        "{problem}.",
        "Correct the manifest (kubectl apply --dry-run=server shows the same).",
    ),
    Reason(
        "EngineUnsupported",
        "The container runs another engine than vLLM.",
        "container {container!r} runs {program!r}, which is not vLLM.",
        "KVShare works with vLLM 0.30 and later; remove the annotation from this pod.",
    ),
    Reason(
        "ImageVolumeUnsupported",
        "The cluster's version is older than image volumes, or cannot be read.",
        "image volumes need Kubernetes 1.35 or later; this cluster says {given!r}.",
        "Set connector.source to InitContainer.",
    ),
    Reason(
        "NotInjected",
        "(status) an opted-in pod carries no record of the webhook.",
        "{pods} pod(s) asked for this pool while the webhook did not answer: {owners}.",
        "Restart them once the webhook serves: {command}",
    ),
    Reason(
        "RecordDiffers",
        "(status) the record annotation does not say what the pod's spec says.",
        "the record annotation of {pods} pod(s) was changed by hand; the status uses the pod's own flags.",
        "Nothing depends on it; restart the pods to get a fresh record: {command}",
    ),
    Reason(
        "FingerprintSplit",
        "(status) members of one pool keep different fingerprints and never hit each other's blocks.",
        "members keep {count} different fingerprints; they differ in: {fields}.",
        "Make these equal on every member.",
    ),
    Reason(
        "MembersIsolated",
        "(status) members cannot share.",
        "{pods} member(s) do not share: {problem}.",
        "See status.problems for each owner and reason.",
    ),
    Reason(
        "GroupIncomplete",
        "(status) a group of pods (LeaderWorkerSet, Ray) has opted in only in part.",
        "{groups} group(s) of pods have opted in only in part: {problem}.",
        "Put the annotation kvshare.dev/pool on the template of leader and workers alike, then restart the group.",
    ),
    Reason(
        "Outdated",
        "(status) members run an older revision of the pool; they share the same cache.",
        "{pods} member(s) were injected for revision {given}, the pool is at {expected}.",
        "Restart them when it suits you: {command}",
    ),
    Reason(
        "CacheSplit",
        "(status) members use another cache namespace or Store TP than the pool now has.",
        "{pods} member(s) use {given}, the pool now uses {expected}: they do not share with new pods.",
        "Restart them: {command}",
    ),
    Reason(
        "Unreported",
        "(status) injected members that have not reported yet.",
        "{pods} injected member(s) have not reported.",
        "An engine reports within a few minutes of its start. If it does not, look at its log, and at what keeps it "
        "from port 9444 of the webhook's Service, such as a NetworkPolicy: one that cannot report shares all the same.",
    ),
    Reason(
        "MooncakeMissing",
        "(reported by a member) the image has no usable Mooncake.",
        "the engine's image has no usable Mooncake package.",
        "Use an image that contains it, or install mooncake-transfer-engine.",
    ),
    Reason(
        "SpecInvalid",
        "(status) the stored pool object breaks the rules of its schema.",
        "{problem}.",
        "Correct the pool.",
    ),
    Reason(
        "StoreTPConflict",
        "(status) no Store TP size satisfies the pool.",
        "{problem}.",
        "Correct the sizes, storeTPSize or model.kvHeads.",
    ),
    Reason(
        "StoreTPMoved",
        "(plan) a change of the pool moves Store TP or the namespace, so new pods start with an empty cache.",
        "{problem}.",
        "Set storeTPSize to keep the old value if it fits, or accept an empty cache.",
    ),
    Reason(
        "StoreUnreachable",
        "(status) the store's master does not answer the operator.",
        "{address} does not answer from the operator: {problem}.",
        "Check the address, the master and NetworkPolicies; engines keep serving without the store.",
    ),
    Reason(
        "ManagedStoreDisabled",
        "(status) the pool asks for a managed store, and this operator manages none.",
        "store.type is Managed, and managed stores are switched off in this installation.",
        "Set managedStore.enabled in the chart, or make a pool with store.type External.",
    ),
    Reason(
        "StoreImageMissing",
        "(status) no image for the managed store is known.",
        "store.managed.image is not set, and the chart names no image with Mooncake's programs.",
        "Set store.managed.image in the pool, or managedStore.image in the chart.",
    ),
    Reason(
        "StoreObjectForeign",
        "(status) an object with the name of one of the store's belongs to somebody else.",
        "{kind} {name!r} exists and does not belong to this pool.",
        "Remove or rename it; one that a deleted pool of the same name left disappears by itself.",
    ),
    Reason(
        "StoreRefused",
        "(status) the API server refuses an object of the managed store: permissions, quota, admission.",
        "{kind} {name!r} was refused: {problem}.",
        "Correct the pool, or the permission, quota or policy that is named.",
    ),
    Reason(
        "StoreStarting",
        "(status) master or nodes of the managed store are not ready.",
        "{what} of the managed store is ready: {problem}.",
        "Engines serve without the store until then; if it lasts, look at the store's pods.",
    ),
)

REASONS: Final[dict[str, Reason]] = {row.code: row for row in _ROWS}
"""All rows by code."""


def refusal(code: str, /, **facts: object) -> Refusal:
    """Fill in a row: `refusal("PPMismatch", given=2, pool="p1", expected="1")`.

    Raises KeyError if the row or a fact that its templates name is missing: a fault of the caller.
    """
    row = REASONS[code]
    return Refusal(code=code, message=row.message.format(**facts), remedy=row.remedy.format(**facts), ours=row.ours)
