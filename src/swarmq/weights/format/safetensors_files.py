"""A model's safetensors files, checked by their headers without loading weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarmq.errors import EngineError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_FIELD_BYTES = 8
"""Size in bytes of the first field of a file, which holds the header's length."""


class TensorHeader(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int] = (0, 0)
    """Start and end in bytes, counted from the end of the header; absent in the metadata entry."""


class SafetensorsIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    """Name of a weight -> name of the file that holds it."""


_header_decoder = msgspec.json.Decoder(dict[str, TensorHeader])


def find_weight_files(folder: Path) -> list[Path]:
    """Return the files named by the index or, without an index, all safetensors files."""
    index = folder / INDEX_FILE
    named = (
        msgspec.json.decode(index.read_bytes(), type=SafetensorsIndex).weight_map.values() if index.is_file() else ()
    )
    return [folder / name for name in sorted(set(named))] or sorted(folder.glob("*.safetensors"))


def check_weight_files(folder: Path) -> None:
    """Raise EngineError if there are no weight files, or one is missing or damaged."""
    try:
        files = find_weight_files(folder)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(f"{folder / INDEX_FILE} cannot be read ({error}): fetch it again") from error
    if not files:
        raise EngineError(f"{folder} has no weights (*.safetensors): save the model with save_pretrained()")
    for file in files:
        try:
            if damage := _find_damage(file):
                raise EngineError(f"{file} is damaged: {damage}; fetch it again")
        except OSError as error:
            raise EngineError(f"{file} cannot be read ({error.strerror}): fetch it again") from error


def _find_damage(file: Path) -> str:
    """Return what is wrong with the file; "" if it is complete."""
    size = file.stat().st_size
    with file.open("rb") as source:
        length = int.from_bytes(source.read(LENGTH_FIELD_BYTES), "little")
        if size < LENGTH_FIELD_BYTES + length:
            return f"it ends within its header ({size} bytes)"
        try:
            tensors = _header_decoder.decode(source.read(length))
        except msgspec.MsgspecError as error:
            return f"its header is invalid ({error})"
    expected = LENGTH_FIELD_BYTES + length + max((each.data_offsets[1] for each in tensors.values()), default=0)
    return f"it has {size} bytes, but its header says {expected}" if size != expected else ""
