from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.server.tokenizer import Tokenizer, TokenizerError


def test_the_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer):
    text = "Zürich 世界 😀\n\t<|im_start|>x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_part_of_a_character_is_written_as_bytes(tokenizer: Tokenizer):
    first = tokenizer.encode("世", add_special_tokens=False)[0]
    assert tokenizer.token_text(first) == "bytes:" + "".join(
        f"\\x{byte:02x}" for byte in tokenizer.token_bytes(first)
    )


def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, model_dir):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_dir)
    for text in (
        "",
        "Hello world",
        "  two  spaces",
        "世界 😀",
        "<|im_start|>user\nHi<|im_end|>",
        "def f():\n\treturn",
    ):
        assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"]


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_the_frontend_imports_neither_torch_nor_transformers():
    code = (
        "import sys, diptych.launch.worker;"
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)) and 1 or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
