"""Setting: what the meaning of some caches depends on besides their specifications."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What an engine says about its kernels and its model.

    Attributes:
        platform: the engine's name of the platform whose kernels write the keys of indexers; empty when nobody has said
            it.
        keys: the engine's name of the type of these keys.
        kernels: digest of everything that chooses the kernels of recurrent states; empty when nobody has said it.
        hidden_layers: layers of the model, behind which those of a draft are counted; 0 when nobody has said it.
    """

    platform: str = ""
    keys: str = ""
    kernels: str = ""
    hidden_layers: int = 0
