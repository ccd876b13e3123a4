"""Which model is served, and how its weights are read."""

from __future__ import annotations

from diptych.common_config.declare import OPEN, REQUIRED, Namespace, leaf
from diptych.common_config.programs import Program

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "bfloat16", "float16", "float32")


class Model(Namespace):
    """Which model is served, and how its weights are read."""

    model_path: str = leaf(
        REQUIRED,
        help=f"A directory, a .gguf file, a hub id, or {DEFAULT_MODEL} for the packaged default model.",
        program_defaults={Program.LOCAL: DEFAULT_MODEL},
        metavar="MODEL",
    )
    served_model_name: str = leaf(
        OPEN,
        help="The name that clients use for the model.",
        open_means="the model path, without its folders when it is a local path",
        metavar="NAME",
    )
    weight_version: str = leaf(
        "default",
        help="A label for the weights, shown with each answer of /generate; it may change while running.",
        metavar="LABEL",
    )
    tokenizer_path: str = leaf(
        OPEN,
        help="Where the tokenizer is, if apart from the model.",
        open_means="the model path",
        metavar="PATH",
    )
    revision: str | None = leaf(
        None, help="Branch, tag or commit of a hub model.", open_means="the hub's default branch"
    )
    dtype: str = leaf(
        "auto",
        help="What weights and activations are computed in; auto takes what the model was saved in.",
        choices=DTYPES,
    )
    load_format: str = leaf(
        "auto",
        help="How weights are stored; dummy makes random ones from the model's configuration.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    context_length: int | None = leaf(
        None,
        help="Longest prompt plus output.",
        unit="tokens",
        ge=1,
        open_means="what the model's own configuration says",
    )
    model_cache_dir: str = leaf(
        OPEN,
        help="Where converted models are kept.",
        open_means="$XDG_CACHE_HOME/diptych, or ~/.cache/diptych",
        metavar="DIR",
    )
    chat_template: str | None = leaf(
        None,
        help="A Jinja chat template file used in place of the model's.",
        open_means="the model's own",
        metavar="PATH",
    )
    random_seed: int = leaf(0, help="Seed of the weights that --load-format dummy makes.", ge=0)
