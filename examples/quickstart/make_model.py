"""Write a tiny random Llama-style model and a one-character-a-token tokenizer: ``python make_model.py FOLDER``.

Takes a few seconds, needs no download, and gives the same weights each time. 110,000 parameters: enough to learn
this folder's task from reward alone within a minute on two CPU cores.
"""

import argparse
import os
import string

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = string.ascii_lowercase + string.digits + " .,:;!?+-=\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    # Byte-pair encoding without merges: every character is a token of its own.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.08,  # large, so that the prompt shows in the first logits already and can be learned from
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where to write the model")
    folder = parser.parse_args().folder
    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model and tokenizer written to {folder}")


if __name__ == "__main__":
    main()
