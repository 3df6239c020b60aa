"""The command line: exit codes, what goes to which stream, and one sentence for every mistake.

Most cases call `main` in this process; signals, missing extras and import weight need a process of
their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from qwen3vl_export import __version__
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_tools.cli import _make_parser, main

_EXPORT = ("export", "CHECKPOINT", "--output", "OUT")
_RUN = ("run", "BUNDLE", "--prompt", "What?", "--max-new-tokens", "3", "--temperature", "0")


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="session")
def inputs(
    tmp_path_factory: pytest.TempPathFactory,
    bundle: Callable[..., Path],
    checkpoint: Callable[[str], Path],
) -> dict[str, Path]:
    """Words of a command line -> the files that they stand for."""
    folder = tmp_path_factory.mktemp("inputs")
    words = {
        "BUNDLE": bundle("trained"),
        "CHECKPOINT": checkpoint("trained"),
        "ABSENT": folder / "absent",
    }
    contents = {
        "TEXT": ("text.png", b"this is no picture"),
        "EMPTY_FILE": ("empty.png", b""),
        "MESSAGES": (
            "messages.json",
            b'[{"role": "user", "content": [{"type": "text", "text": "What?"}]}]',
        ),
        "UNKNOWN_KEY": (
            "unknown.json",
            b'[{"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}]',
        ),
        "NOT_JSON": ("not.json", b"[{"),
        "NOT_A_LIST": ("object.json", b'{"role": "user"}'),
    }
    for word, (name, data) in contents.items():
        words[word] = folder / name
        words[word].write_bytes(data)
    for word, mode, size in (
        ("THIN", "RGB", (1, 5000)),
        ("DOT", "RGB", (1, 1)),
        ("PHOTO", "RGB", (96, 64)),
        ("BOMB", "1", (14000, 14000)),
    ):
        words[word] = folder / f"{word.lower()}.png"
        Image.new(mode, size).save(words[word])
    words["EMPTY_DIR"] = folder / "empty"
    words["EMPTY_DIR"].mkdir()
    words["PICKLED"] = folder / "pickled"
    words["PICKLED"].mkdir()
    shutil.copyfile(words["CHECKPOINT"] / "config.json", words["PICKLED"] / "config.json")
    (words["PICKLED"] / "pytorch_model.bin").write_bytes(b"x")
    words["MOE"] = folder / "moe"
    words["MOE"].mkdir()
    shutil.copyfile(words["CHECKPOINT"] / "model.safetensors", words["MOE"] / "model.safetensors")
    (words["MOE"] / "config.json").write_text('{"model_type": "qwen3_vl_moe"}', encoding="utf-8")
    return words


@dataclass(frozen=True)
class Outcome:
    code: object
    out: str
    err: str


@pytest.fixture
def call(
    inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run a command line in this process; OUT is a path that does not exist yet."""

    def run(*args: str) -> Outcome:
        words = inputs | {"OUT": tmp_path / "out" / "bundle"}
        capsys.readouterr()
        try:
            code: object = main([str(words.get(arg, arg)) for arg in args])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "ABSENT", "--output", "OUT"), "expected a checkpoint folder, found nothing at"),
        (("export", "EMPTY_DIR", "--output", "OUT"), "has no config.json; expected a Hugging Face"),
        (("export", "TEXT", "--output", "OUT"), "text.png is a file"),
        (("export", "PICKLED", "--output", "OUT"), "pickled weights (pytorch_model.bin)"),
        (("export", "MOE", "--output", "OUT"), "found model_type 'qwen3_vl_moe'"),
        ((*_EXPORT, "--components", "vision,audio"), "found 'audio'"),
        ((*_EXPORT, "--components", "vision,vision"), "must name each component once"),
        ((*_EXPORT, "--components", ""), "--components must be one of vision, embedding, decoder"),
        (("export", "CHECKPOINT", "--output", "TEXT", "--force"), "is not a bundle, so it is left"),
        (("export", "CHECKPOINT", "--output", "BUNDLE"), "add --force to replace it"),
        (("inspect", "ABSENT"), "expected a bundle folder, but found nothing at"),
        (("inspect", "TEXT"), "text.png is a file"),
        (("inspect", "CHECKPOINT"), "has no manifest.json; make one with: qwen3vl-export export"),
        (("run", "ABSENT", "--prompt", "x"), "expected a bundle folder, but found nothing at"),
        (("run", "CHECKPOINT", "--prompt", "x"), "has no manifest.json"),
        (("run", "BUNDLE"), "give either --prompt or --messages"),
        ((*_RUN, "--messages", "MESSAGES"), "give either --prompt or --messages"),
        ((*_RUN, "--image", "TEXT"), "text.png' is not an image in a format"),
        ((*_RUN, "--image", "EMPTY_FILE"), "empty.png' is empty"),
        ((*_RUN, "--image", "ABSENT"), "absent' does not exist"),
        ((*_RUN, "--image", "EMPTY_DIR"), "empty' is a directory"),
        ((*_RUN, "--image", "THIN"), "at most 200 times the other, found 1x5000"),
        ((*_RUN, "--image", "BOMB"), "an image may have at most 89478485 pixels"),
        ((*_RUN, "--image", "http://localhost/a.png"), "is not allowed"),
        ((*_RUN, "--video", "EMPTY_DIR", "--raw-fps", "2"), "a video needs at least one frame"),
        ((*_RUN, "--video", "clip.mp4"), "extract its frames"),
        ((*_RUN, "--video", "EMPTY_DIR", "--raw-fps", "-2"), "raw_fps must be a number above zero"),
        ((*_RUN, "--image", "DOT", "--min-pixels", "0"), "min_pixels must be a positive integer"),
        ((*_RUN, "--fps", "2"), "--fps has no effect without --video"),
        ((*_RUN, "--image", "DOT", "--raw-fps", "2"), "--raw-fps has no effect without --video"),
        ((*_RUN, "--max-pixels", "99"), "--max-pixels has no effect without --image or --video"),
        ((*_RUN, "--capacity", "8"), "cache slots, but the capacity is 8; shorten the prompt"),
        ((*_RUN, "--capacity", "0"), "capacity must be a positive integer, found 0"),
        ((*_RUN, "--capacity", str(10**15)), "does not fit into memory; lower one of them"),
        ((*_RUN, "--threads", "0"), "threads must be an integer from 1 to"),
        ((*_RUN, "--prefill-chunk", "-1"), "prefill_chunk must be a positive integer, found -1"),
        ((*_RUN, "--temperature", "-1"), "temperature must be"),
        ((*_RUN, "--top-p", "nan"), "top_p must be"),
        ((*_RUN, "--max-new-tokens", "0"), "max_new_tokens must be an integer >= 1"),
        ((*_RUN, "--stop", ""), "stop must hold no empty string"),
        (("run", "BUNDLE", "--prompt", "a\udcffb"), "not valid Unicode"),
        (("run", "BUNDLE", "--prompt", "<|image_pad|>"), "placeholder"),
        (("run", "BUNDLE", "--messages", "UNKNOWN_KEY"), "has the unknown key 'colour'"),
        (("run", "BUNDLE", "--messages", "NOT_JSON"), "is not a readable JSON file"),
        (("run", "BUNDLE", "--messages", "NOT_A_LIST"), "must hold a list of chat messages"),
        (("run", "BUNDLE", "--messages", "ABSENT"), "is not a readable JSON file"),
        (("run", "BUNDLE", "--messages", "MESSAGES", "--image", "DOT"), "drop --image, --video"),
        (("run", "BUNDLE", "--messages", "MESSAGES", "--system", "x"), "drop --image, --video"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    call: Callable[..., Outcome], tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    outcome = call(*args)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "required: COMMAND"),
        (("convert",), "invalid choice: 'convert'"),
        (("export",), "required: checkpoint, --output"),
        (("export", "CHECKPOINT"), "required: --output"),
        ((*_EXPORT, "--quantize", "int8"), "unrecognized arguments: --quantize int8"),
        ((*_EXPORT, "--precision", "int3"), "--precision: invalid choice: 'int3'"),
        ((*_EXPORT, "--target", "coreml"), "--target: invalid choice: 'coreml'"),
        ((*_EXPORT, "--forc"), "unrecognized arguments: --forc"),
        ((*_RUN, "--beams", "4"), "unrecognized arguments: --beams 4"),
        ((*_RUN, "--top-k", "many"), "--top-k: invalid int value: 'many'"),
        (("inspect", "BUNDLE", "--yaml"), "unrecognized arguments: --yaml"),
        (("inspect",), "required: bundle"),
    ],
)
def test_wrong_usage_exits_with_2(
    call: Callable[..., Outcome], args: tuple[str, ...], message: str
) -> None:
    outcome = call(*args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("usage: qwen3vl-export")
    assert message in outcome.err


@pytest.mark.parametrize("command", [(), ("export",), ("run",), ("inspect",), ("demo",)])
def test_help_exits_with_0(call: Callable[..., Outcome], command: tuple[str, ...]) -> None:
    outcome = call(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith("usage: qwen3vl-export")
    assert outcome.err == ""


def test_version(call: Callable[..., Outcome]) -> None:
    assert call("--version") == Outcome(0, f"qwen3vl-export {__version__}\n", "")


# --- damaged bundles -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "run"])
@pytest.mark.parametrize("fault", ["byte", "truncated", "missing", "manifest", "version", "escape"])
def test_damaged_bundles_are_refused(
    bundle_copy: Path, call: Callable[..., Outcome], command: str, fault: str
) -> None:
    data, manifest = bundle_copy / "vision.onnx.data", bundle_copy / "manifest.json"
    if fault == "byte":
        with data.open("r+b") as file:
            file.seek(70_000)
            byte = file.read(1)
            file.seek(70_000)
            file.write(bytes([byte[0] ^ 1]))
    elif fault == "truncated":
        with data.open("r+b") as file:
            file.truncate(100_000)
    elif fault == "missing":
        data.unlink()
    else:
        old, new = {
            "manifest": ('"components"', '"component'),
            "version": ('"format_version": 1', '"format_version": 99'),
            "escape": ('"vision.onnx.data"', '"../vision.onnx.data"'),
        }[fault]
        text = manifest.read_text(encoding="utf-8")
        assert old in text
        manifest.write_text(text.replace(old, new), encoding="utf-8")
    outcome = call(command, str(bundle_copy), *(("--prompt", "x") if command == "run" else ()))
    expected = {
        "byte": "vision.onnx.data is damaged: expected SHA-256",
        "truncated": "vision.onnx.data is damaged: expected",
        "missing": "vision.onnx.data is missing; export the bundle again",
        "manifest": "manifest.json is not readable JSON",
        "version": "expected a bundle of format version 1, found 99",
        "escape": "outside the bundle: '../vision.onnx.data'",
    }[fault]
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert expected in outcome.err


def test_a_bundle_without_a_component_cannot_run(call: Callable[..., Outcome]) -> None:
    made = call(*_EXPORT, "--components", "embedding", "--precision", "fp16")
    assert made.code == 0, made.err
    *sizes, path = made.out.splitlines()
    assert [line.split()[0] for line in sizes] == ["embedding"]
    assert Path(path).is_dir()
    outcome = call("run", "OUT", "--prompt", "x")
    assert outcome.code == 1
    assert "has no vision graph" in outcome.err
    assert call(*_EXPORT, "--components", "embedding").code == 1
    replaced = call(*_EXPORT, "--components", "embedding", "--precision", "bf16", "--force")
    assert replaced.code == 0
    outcome = call("run", "OUT", "--prompt", "x")
    assert outcome.code == 1
    assert "is bf16, which ONNX Runtime's CPU provider cannot run; export it with" in outcome.err


# --- run -----------------------------------------------------------------------------------------


def test_run_prints_one_json_object(call: Callable[..., Outcome]) -> None:
    outcome = call(*_RUN, "--image", "PHOTO", "--json")
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    result = json.loads(outcome.out)
    assert {key: type(value).__name__ for key, value in result.items()} == {
        "text": "str",
        "token_ids": "list",
        "prompt_tokens": "int",
        "finish_reason": "str",
        "timing": "dict",
    }
    assert result["finish_reason"] in ("stop", "length")
    assert 1 <= len(result["token_ids"]) <= 3
    timing = result["timing"]
    assert timing.keys() == {
        "preprocess_ms",
        "vision_ms",
        "prefill_ms",
        "ttft_ms",
        "inter_token_ms",
        "e2e_ms",
        "output_tokens",
        "tpot_ms",
        "output_tokens_per_s",
    }
    assert timing["output_tokens"] == len(result["token_ids"])
    assert len(timing["inter_token_ms"]) == len(result["token_ids"]) - 1
    assert 0 < timing["ttft_ms"] <= timing["e2e_ms"]


@pytest.mark.parametrize(
    "args",
    [
        ("--image", "PHOTO"),
        ("--image", "DOT", "--image", "PHOTO", "--system", "Be brief."),
        ("--max-new-tokens", "40", "--stop", "zzz"),
        (),
    ],
    ids=["image", "two-images", "stop", "text"],
)
def test_the_streamed_text_is_the_text_of_the_json(
    call: Callable[..., Outcome], args: tuple[str, ...]
) -> None:
    streamed, whole = call(*_RUN, *args), call(*_RUN, *args, "--json")
    assert (streamed.code, whole.code) == (0, 0)
    result = json.loads(whole.out)
    assert streamed.out == result["text"] + "\n"
    assert streamed.err.startswith(f"[{result['prompt_tokens']} prompt tokens; ")
    assert whole.err == ""


def test_messages_and_flags_build_the_same_prompt(
    call: Callable[..., Outcome], inputs: dict[str, Path], tmp_path: Path
) -> None:
    flags = call(*_RUN, "--image", "PHOTO", "--system", "Be brief.", "--json")
    content = [
        {"type": "image", "image": str(inputs["PHOTO"])},
        {"type": "text", "text": "What?"},
    ]
    file = tmp_path / "messages.json"
    file.write_text(
        json.dumps(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        ),
        encoding="utf-8",
    )
    sampling = ("--max-new-tokens", "3", "--temperature", "0", "--json")
    messages = call("run", "BUNDLE", "--messages", str(file), *sampling)
    first, second = json.loads(flags.out), json.loads(messages.out)
    for key in ("text", "token_ids", "prompt_tokens"):
        assert first[key] == second[key]
    without_system = json.loads(call(*_RUN, "--image", "PHOTO", "--json").out)
    assert without_system["prompt_tokens"] < first["prompt_tokens"]


def test_the_order_of_images_and_videos_is_kept() -> None:
    flags = ("--video", "v", "--image", "i", "--video", "w")
    args = _make_parser().parse_args(["run", "bundle", "--prompt", "x", *flags])
    assert args.media == [("video", "v"), ("image", "i"), ("video", "w")]


def test_limits_reach_the_runner(call: Callable[..., Outcome]) -> None:
    small = call(*_RUN, "--image", "PHOTO", "--max-pixels", "4096", "--json")
    large = call(*_RUN, "--image", "PHOTO", "--min-pixels", "36000", "--json")
    tokens = [json.loads(outcome.out)["prompt_tokens"] for outcome in (small, large)]
    assert tokens[0] < tokens[1]
    chunked = call(*_RUN, "--image", "PHOTO", "--prefill-chunk", "3", "--json")
    plain = call(*_RUN, "--image", "PHOTO", "--json")
    assert json.loads(chunked.out)["token_ids"] == json.loads(plain.out)["token_ids"]


@pytest.mark.parametrize(
    "args", [("--image", "DOT"), ("--prompt", "")], ids=["1x1-image", "empty-prompt"]
)
def test_odd_but_valid_input_is_answered(
    call: Callable[..., Outcome], args: tuple[str, ...]
) -> None:
    outcome = call(*_RUN, *args, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["token_ids"]


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_every_tensor_and_that_hashes_match(
    call: Callable[..., Outcome], inputs: dict[str, Path]
) -> None:
    outcome = call("inspect", "BUNDLE")
    assert outcome.code == 0
    assert outcome.err == ""
    manifest = json.loads((inputs["BUNDLE"] / "manifest.json").read_text(encoding="utf-8"))
    for component in COMPONENTS:
        entry = manifest["components"][component]
        for spec in (*entry["inputs"], *entry["outputs"]):
            shape = ", ".join(str(dim) for dim in spec["shape"])
            assert any(
                line.split()[1:3] == [spec["name"], spec["dtype"]] and f"[{shape}]" in line
                for line in outcome.out.splitlines()
            ), spec
    assert outcome.out.splitlines()[-1].startswith("all 12 files (")
    assert outcome.out.splitlines()[-1].endswith("match their SHA-256")


def test_inspect_json_is_the_manifest(
    call: Callable[..., Outcome], inputs: dict[str, Path]
) -> None:
    outcome = call("inspect", "BUNDLE", "--json")
    assert outcome.code == 0
    text = (inputs["BUNDLE"] / "manifest.json").read_text(encoding="utf-8")
    assert json.loads(outcome.out) == json.loads(text)


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_an_export_and_leaves_the_old_bundle(
    bundle_copy: Path, inputs: dict[str, Path], signum: signal.Signals
) -> None:
    """The embedding is written when the signal comes; tracing the vision encoder takes seconds."""
    before = {path: path.stat() for path in bundle_copy.rglob("*")}
    folder = bundle_copy.parent
    command = [sys.executable, "-m", "qwen3vl_tools.cli", "export", str(inputs["CHECKPOINT"])]
    options = ["--output", str(bundle_copy), "--force", "--components", "embedding,vision"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob(".bundle.partial-*/embedding.onnx")):
            assert process.poll() is None, "the export ended before it could be interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr
    assert list(folder.iterdir()) == [bundle_copy]
    assert before.keys() == set(bundle_copy.rglob("*"))
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in before.items())


def in_process_without(modules: tuple[str, ...], *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command line where importing `modules` fails as if they were not installed."""
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({modules!r}))\n"
        "from qwen3vl_tools.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("modules", "args", "message"),
    [
        (
            ("torch",),
            ("export", "CHECKPOINT", "--output", "ABSENT"),
            "`export` needs the Python module 'torch', which is not installed; install it with: "
            "pip install 'qwen3vl-export[export]'",
        ),
        (
            ("onnx_ir",),
            ("export", "CHECKPOINT", "--output", "ABSENT"),
            "'onnx_ir', which is not installed; install it with: pip install "
            "'qwen3vl-export[export]'",
        ),
        (
            ("onnxruntime",),
            ("run", "BUNDLE", "--prompt", "x"),
            "'onnxruntime', which is not installed; install it with: pip install "
            "'qwen3vl-export[cpu]'",
        ),
        (
            ("torch", "transformers"),
            ("demo",),
            "`demo` needs the Python module 'torch', which is not installed; install it with: "
            "pip install 'qwen3vl-export[export]'",
        ),
    ],
    ids=["export-torch", "export-onnx-ir", "run-onnxruntime", "demo-torch"],
)
def test_a_missing_extra_is_named(
    inputs: dict[str, Path], modules: tuple[str, ...], args: tuple[str, ...], message: str
) -> None:
    done = in_process_without(modules, *(str(inputs.get(arg, arg)) for arg in args))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bundle_runs_without_torch_and_is_inspected_without_onnxruntime(
    inputs: dict[str, Path],
) -> None:
    heavy = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "huggingface_hub", "tqdm")
    args = [str(inputs.get(arg, arg)) for arg in (*_RUN, "--image", "PHOTO", "--json")]
    done = in_process_without(heavy, *args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"]
    done = in_process_without((*heavy, "onnxruntime"), "inspect", str(inputs["BUNDLE"]))
    assert done.returncode == 0, done.stderr
    assert "match their SHA-256" in done.stdout


def test_an_ignored_hangup_stays_ignored(call: Callable[..., Outcome]) -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert call("inspect", "ABSENT").code == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["at-the-end", "before-the-end"])
def test_an_answer_that_cannot_be_written_is_a_sentence(
    inputs: dict[str, Path], options: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "qwen3vl_tools.cli", "inspect", str(inputs["BUNDLE"])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: writing the answer failed: No space left on device\n"


def test_a_reader_that_goes_away_is_no_crash(inputs: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "qwen3vl_tools.cli", "inspect", str(inputs["BUNDLE"])]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert done.stderr == ""
