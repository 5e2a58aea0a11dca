"""The command line names models, checkpoints and texts; wrong names are refused in words."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from geomon import read
from geomon.cli import make_app
from geomon.sweep import find_named, read_inputs
from support.models import transformer


def command(*arguments):
    return CliRunner().invoke(make_app(), ["scan", *map(str, arguments)])


class Own:
    """A class whose objects no file may bring along."""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working folder with checkpoints, with files of none, and with a batch and a text."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "files", "folders/checkpoint-1", "own", "orphan", "lightning"):
        Path(name).mkdir(parents=True)
    Path("files/a.ckpt").touch()
    Path("folders/checkpoint-1/config.json").write_text("{}")
    Path("orphan/adapter_config.json").write_text("{}")
    torch.save({"global_step": 1, "hyper_parameters": Own()}, "own/a.ckpt")
    torch.save({"global_step": 1, "hyper_parameters": {"arch": 1}}, "lightning/a.ckpt")
    for name, content in (("none", {"global_step": 1}), ("list", [1])):
        Path(name).mkdir()
        torch.save(content, f"{name}/step1.ckpt")
    torch.save({"input_ids": torch.randint(0, 50, (4, 8))}, "batch.pt")
    Path("text").write_text("to be or not to be, that is the question; " * 20)
    Path("blank").write_text(" \n")


BATCH = ("--inputs", "batch.pt")
# Arguments, and words of the one line that refuses them.
WRONG = [
    (("./x", *BATCH), "no checkpoints in x"),
    (("a/b/c", *BATCH), "no checkpoints in a/b/c"),
    (("./empty", *BATCH), "no checkpoints in empty"),
    (("model", "--checkpoints", "empty", *BATCH), "expected the folder of a transformers model"),
    (("builtins:len", "--checkpoints", "empty", *BATCH), "no *.ckpt files in empty"),
    (("builtins:len", *BATCH), "needs the folder of its *.ckpt files, --checkpoints FOLDER"),
    (("model", "--checkpoints", "folders", "--revisions", "main", *BATCH), "not both"),
    (("builtins:len", "--checkpoints", "own", *BATCH), "classes that torch.serialization.add_safe"),
    (("builtins:len", "--checkpoints", "lightning", *BATCH), "hyper-parameters in the file (arch)"),
    (("builtins:dict", "--checkpoints", "lightning", *BATCH), "built a dict: expected a torch mod"),
    (("builtins:len", "--checkpoints", "none", *BATCH), "hyper-parameters in the file (none)"),
    (("builtins:dict", "--checkpoints", "list", *BATCH), "built a dict: expected a torch mod"),
    (("orphan", *BATCH), "does not say which model the adapter belongs to"),
    (("recipes.enwik8.train:none", "--checkpoints", "x", *BATCH), "cannot be imported"),
    (("math:pi", "--checkpoints", "x", *BATCH), "math:pi is not a function"),
    (("folders",), "pass one of --text FILE"),
    (("folders", "--text", "text", *BATCH), "pass one of --text FILE"),
    (("folders", "--text", "blank"), "the text is empty"),
    (("folders", "--text", "text"), "no tokenizer in folders: name the folder or hub name of one"),
    (("folders", "--text", "text", "--length", "0"), "length must be a whole number"),
    (("folders", "--text", "text", "--sequences", "0"), "sequences must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_names_end_in_one_line(folders, arguments, words):
    result = command(*arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not Path("scan/readings.jsonl").exists()


@pytest.mark.parametrize("name", ["no-such-model", "runs/no-such-run"])
def test_a_name_that_the_hub_does_not_know_is_refused_with_its_words(folders, monkeypatch, name):
    def from_hub(source, *, revision, **options):
        raise OSError(f"{source} is not a local folder and We couldn't connect to {revision} ")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_hub)
    result = command(name, *BATCH)
    words = f"no checkpoint could be read: main (step 0): OSError: {name} is not a local folder"
    assert words in " ".join(result.output.split())


def test_windows_of_a_text_are_read_by_a_model_in_a_folder(folders):
    model = transformer("gpt2")
    model.resize_token_embeddings(256)
    model.save_pretrained("run/checkpoint-5")
    sizes = ("--sequences", 4, "--length", 24, "--tokens", 48)
    result = command("run", "--text", "text", "--tokenizer", "bytes", *sizes)
    assert "1 step in scan: geomon watch scan" in result.output
    (reading,) = read("scan")
    assert (reading.step, reading.tokens) == (5, 48)


def lay(*paths):
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


# Model, folder of checkpoints and revisions; their names, steps and source.
NAMED = [
    (("gpt2", None, ()), [("main", 0)], "gpt2"),
    (("someone/model", None, ()), [("main", 0)], "someone/model"),
    (("someone/model", None, ("step9", "step10")), [("step9", 9), ("step10", 10)], "someone/model"),
    (("runs", None, ()), [("checkpoint-3", 3)], "runs"),
    (("runs/checkpoint-3", None, ()), [("checkpoint-3", 3)], "runs/checkpoint-3"),
    (("os:path", None, ()), [("checkpoint-5", 5)], "os:path"),  # a folder of that name goes first
    (("someone/model", Path("runs"), ()), [("checkpoint-3", 3)], "runs"),
]


@pytest.mark.parametrize(("named", "expected", "source"), NAMED)
def test_names_are_those_of_folders_that_exist_or_else_of_the_hub(folders, named, expected, source):
    lay("runs/checkpoint-3/config.json", "os:path/checkpoint-5/config.json")
    model, found = find_named(*named)
    assert model is None
    assert [(each.name, each.step) for each in found] == expected
    is_local = Path(source).exists()
    assert {each.source for each in found} == {str(Path(source).resolve()) if is_local else source}


@pytest.mark.parametrize("name", ["./x", "/x", "~/x", "x/y/z"])
def test_a_name_that_looks_like_a_path_is_not_asked_of_the_hub(folders, name):
    with pytest.raises(ValueError, match="no checkpoints in"):
        find_named(name, None, ())


# Model, whether its checkpoints are one file, and the vocabulary that it is built with.
@pytest.mark.parametrize(("place", "vocabulary"), [("b.ckpt", 30), ("", 20)])
def test_a_named_function_gets_the_hyper_parameters_of_the_first_step_or_the_named_file(
    folders, place, vocabulary
):
    for name, step, size in (("a", 9, 10), ("b", 7, 30), ("c", 5, 20)):
        held = {"global_step": step, "hyper_parameters": {"vocabulary": size}, "state_dict": {}}
        torch.save(held, f"lightning/{name}.ckpt")
    model, found = find_named(f"{__name__}:Plain", Path("lightning") / place, ())
    assert model.network.config.vocab_size == vocabulary
    steps = [(5, "c.ckpt"), (7, "b.ckpt"), (9, "a.ckpt")]
    assert [(each.step, each.name) for each in found] == ([(7, "b.ckpt")] if place else steps)


# Model, and whether its inputs have a name.
@pytest.mark.parametrize(
    ("model", "is_named"),
    [("someone/model", True), ("folders", True), ("os:path", False), ("a:b", True)],
)
def test_windows_of_a_text_have_a_name_unless_a_function_builds_the_model(folders, model, is_named):
    lay("a:b/config.json")
    sizes = {"sequences": 3, "length": 7}
    inputs = read_inputs(model, None, Path("text"), "bytes", sizes)
    if is_named:
        assert list(inputs) == ["input_ids"]
    ids = inputs["input_ids"] if is_named else inputs
    assert (tuple(ids.shape), ids.dtype, ids.device.type) == ((3, 7), torch.int64, "cpu")
    assert bytes(ids[0].tolist()) == b"to be o"


def test_a_batch_is_read_as_it_was_saved(folders):
    inputs = read_inputs("model", Path("batch.pt"), None, None, {})
    assert list(inputs) == ["input_ids"]
    assert torch.equal(inputs["input_ids"], torch.load("batch.pt")["input_ids"])
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        read_inputs("model", Path("none.pt"), None, None, {})


class Plain(nn.Module):
    """A model that takes token ids, as in a loop without transformers."""

    def __init__(self, vocabulary):
        super().__init__()
        self.network = transformer("gpt2")
        self.network.resize_token_embeddings(vocabulary)

    def forward(self, tokens):
        return self.network(input_ids=tokens).logits


def test_a_named_function_builds_the_model_with_the_hyper_parameters_of_its_file(folders):
    file = {"global_step": 7, "hyper_parameters": {"vocabulary": 256}}
    torch.save(file | {"state_dict": Plain(256).state_dict()}, "lightning/a.ckpt")
    name = f"{__name__}:Plain"
    given = ("--text", "text", "--tokenizer", "bytes", "--sequences", 4, "--length", 24)
    result = command(name, "--checkpoints", "lightning", *given, "--tokens", 48)
    assert result.exit_code == 0, result.output
    assert [reading.step for reading in read("scan")] == [7]
