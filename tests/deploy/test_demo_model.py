import itertools
import zlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "demo-model"
WEIGHTS, MTP, EAGLE3 = (FOLDER / name for name in ("weights", "weights-mtp", "eagle3"))
CRC = 0xD419F8A2  # the checksum of 300 dialogues

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _modules_of_the_demo_model(monkeypatch):
    """Put the training scripts on the path: they import each other by file name."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(2)
    return transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


def as_request(dialogue):
    messages = []
    for message in dialogue.messages:
        entry = {"role": message.role, "content": message.content}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        messages.append(entry)
    return messages


def test_dialogues_are_reproducible():
    from dialogues import stream

    said = [
        message.content for _, dialogue in itertools.islice(stream(5), 300) for message in dialogue.messages
    ]
    # Benchmarks take prompts from here, so their figures depend on it.
    assert zlib.crc32("\n".join(said).encode()) == CRC


def test_held_out_prompts_are_never_trained_on():
    from dialogues import is_held_out, stream

    assert not any(is_held_out(d) for _, d in itertools.islice(stream(1), 500) if len(d.messages) <= 3)
    assert all(is_held_out(d) for _, d in itertools.islice(stream(1, held_out=True), 100))


def test_every_generator_ends_with_a_reply():
    from random import Random

    from chat import segments
    from dialogues import GENERATORS

    for generator in GENERATORS.values():
        for seed in range(40):
            dialogue = generator.make(Random(seed))
            assert dialogue.messages[-1].role == "assistant", generator.name
            assert segments(dialogue)[-2][0].removesuffix("<|im_end|>"), generator.name


def test_template_and_python_render_the_same_text(tokenizer):
    from chat import rendered
    from dialogues import stream

    for _, dialogue in itertools.islice(stream(11), 100):
        tools = list(dialogue.tools) or None
        text = tokenizer.apply_chat_template(as_request(dialogue), tools=tools, tokenize=False)
        assert text == rendered(dialogue)


def test_a_calls_arguments_may_be_a_json_string(tokenizer):
    function = {"name": "get_time", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"function": function}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in text


ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Write a Python function that reverses a string.": "return a[::-1]",
    "Repeat after me: the blue boat waited by the old bridge": "the blue boat waited by the old bridge",
}


def test_greedy_answers(tokenizer, model):
    for question, expected in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            output = model.generate(**prompt, max_new_tokens=80, do_sample=False)
        new = output[0, prompt["input_ids"].shape[1] :]
        assert expected.lower() in tokenizer.decode(new).lower()
        assert new[-1] == tokenizer.eos_token_id


def test_mtp_view_links_the_trunk():
    for path in MTP.iterdir():
        if path.is_symlink():
            assert not Path(path.readlink()).is_absolute()
            assert path.resolve(strict=True).parent == WEIGHTS
    assert (MTP / "model-trunk.safetensors").samefile(WEIGHTS / "model.safetensors")
    assert (MTP / "tokenizer.json").samefile(WEIGHTS / "tokenizer.json")
    own = [path for folder in (MTP, EAGLE3) for path in folder.iterdir() if not path.is_symlink()]
    assert sum(path.stat().st_size for path in own) < 4 * 2**20
