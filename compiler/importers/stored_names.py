"""What a checkpoint calls the arrays of a model, by transformers' own table of renamings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compiler.importers.refused import ImportRefused


def stored_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """From the model's name of each array to the checkpoint's, by transformers' own table of renamings.

    Raises ImportRefused where an array would have to be computed from several stored ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    found: dict[str, str] = {}
    for name in stored:
        own, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if converter is not None and own in known and own != name:
            raise ImportRefused(
                f"it is stored in an older layout, from which {own!r} has to be computed",
                where=f"tensor {name!r}",
                todo="Load the checkpoint with transformers and save_pretrained(OUT, "
                "save_original_format=False)",
            )
        if own in known:  # not a buffer that is computed, which older checkpoints hold too
            found[own] = name
    return found
