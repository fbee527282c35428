"""Tensor files: `.pt` loaded weights-only, `.npz` without pickles, `.safetensors`. torch is loaded when asked for.

`.npz` files are read whole; the others are mapped, so that memory holds what is used.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreload.traces.importers.base import Source
from foreload.traces.importers.json_files import unreadable

if TYPE_CHECKING:
    import torch


def load_pt(source: Source) -> Any:
    """What `torch.save` wrote, with tensors mapped into memory; FileError if it holds more than plain values."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source.path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        line = str(error).splitlines()[0][:160]
        raise source.error("", f"cannot be loaded weights-only (tensors and plain values alone): {line}") from error
    except OSError as error:
        raise unreadable(source.path, error) from error
    except Exception as error:  # a damaged pickle may fail in any way
        raise source.error(
            "", f"not a file of torch.save, or truncated: {' '.join(str(error).split())[:160]}"
        ) from error


def load_layers(source: Source) -> dict[str, torch.Tensor]:
    """Named tensors of a `.pt`, `.npz` or `.safetensors` file, in the file's order."""
    loaders: dict[str, Callable[[Source], dict[str, torch.Tensor]]] = {
        ".pt": _from_pt,
        ".npz": _from_npz,
        ".safetensors": _from_safetensors,
    }
    suffix = Path(source.path).suffix
    if suffix not in loaders:
        raise source.error("", f"suffix {suffix!r}: {', '.join(loaders)} are known")
    return loaders[suffix](source)


def _from_pt(source: Source) -> dict[str, torch.Tensor]:
    import torch

    value = load_pt(source)
    if isinstance(value, dict) and "router_logits" in value:
        value = value["router_logits"]
    if isinstance(value, torch.Tensor):
        value = list(value) if value.dim() == 3 else [value]
    named = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}
    found = {str(name): one for name, one in named.items() if isinstance(one, torch.Tensor)}
    if not named or len(found) < len(named):
        raise source.error("", "a tuple of tensors [tokens, experts], one per MoE layer, is needed")
    return found


def _from_npz(source: Source) -> dict[str, torch.Tensor]:
    import torch

    try:
        with source.path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except OSError as error:
        raise unreadable(source.path, error) from error
    except Exception as error:  # a damaged archive may fail in any way
        line = " ".join(str(error).split())[:160]
        raise source.error("", f"not a .npz file of plain arrays, or truncated: {line}") from error


def _from_safetensors(source: Source) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise unreadable(source.path, error) from error
    except SafetensorError as error:
        raise source.error("", f"not a .safetensors file, or truncated: {error}") from error
