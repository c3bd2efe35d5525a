"""Tiny models in the cache, one folder for each set of parameters; `tiny_llama` has the recipe."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path

from testbed import places
from testbed.prepare.step import key_of
from testbed.tiny_llama import RECIPE, TinyModel, make_model

DEFAULT = TinyModel()


def model_folder(parameters: TinyModel) -> Path:
    """Where a model is kept."""
    return places.MODELS / f"tiny-llama-{key_of(RECIPE, *sorted(asdict(parameters).items()))}"


def tiny_model(parameters: TinyModel = DEFAULT) -> Path:
    """The folder of a model with these parameters; made when it is not in the cache."""
    folder = model_folder(parameters)
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
        make_model(unfinished, parameters)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder
