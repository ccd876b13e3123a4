import json
from collections.abc import Iterator

import pytest
import torch
from support.byte_tokenizer import END
from unit.schedulers.cell import CPU, VOCAB, Cell

from diptych.engine.models.decoder import DecoderLM
from diptych.engine.weights.loader import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "eos_token_id": END,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return load_model(directory, dtype=torch.float32, device=CPU, load_format="dummy", seed=3)


@pytest.fixture
def cell(model: DecoderLM) -> Iterator[Cell]:
    made = Cell(model)
    yield made
    made.close()
