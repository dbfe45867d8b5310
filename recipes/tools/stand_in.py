# /// script
# requires-python = ">=3.11"
# dependencies = ["gguf==0.19.0", "sentence-transformers==6.2.0", "torch==2.13.0",
#   "transformers==5.23.0"]
# ///
"""
Write a small reranker, NLI model or language model that replaces a large one in a rehearsal.

Reads   data/models/minilm; --kind causal, llm: tokenizer and configuration of data/models/smollm2
Writes  FOLDER. cross-encoder, nli: two layers of MiniLM with a new head of one or three logits;
        causal: a SmolLM2 of four layers, untrained; llm: a Llama of one layer that gives every
        prompt the same reply, which holds an order, a label and a text; tiny kinds, for
        tests/benchmarks/full_size.py alone: one layer of width 8, untrained, which takes less time
        than the tokenizer

Examples
    python recipes/tools/stand_in.py work/small/cross-encoder
    python recipes/tools/stand_in.py work/small/causal --kind causal

These rerankers and NLI models score at random until they are trained, since no package on PyPI
holds a small cross-encoder. A rehearsal shows that all stages run; its figures mean nothing.
"""

from pathlib import Path

import kit
import torch
from sentence_transformers import CrossEncoder
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    logging,
)

NLI = ["entailment", "neutral", "contradiction"]
MINILM = Path("data/models/minilm")
SMOLLM2 = Path("data/models/smollm2")
SIZES = {"num_hidden_layers": 4}  # SmolLM2 has 30
TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "hidden_dropout_prob": 0,  # dropout takes most of a CPU's time in training
    "attention_probs_dropout_prob": 0,
}
TINY_MODELS = {  # with MiniLM's tokenizer: class, further settings
    "tiny-encoder": (BertModel, {}),
    "tiny-splade": (BertForMaskedLM, {}),
    "tiny-cross-encoder": (BertForSequenceClassification, {"num_labels": 1}),
    "tiny-nli": (BertForSequenceClassification, {"id2label": dict(enumerate(NLI))}),
}
KINDS = ["cross-encoder", "nli", "causal", "llm", *TINY_MODELS, "tiny-monot5", "tiny-causal"]
ACTIVE = 100  # terms that tiny-splade gives a text
PROMPT = "Judge whether the document is evidence about the query. Answer yes or no."
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
REPLY = "[2] > [1]\n1: 1\n<text>a claim</text>"  # the language model has it as one token


def write_encoder(folder, new, labels):
    """Write two layers of an encoder to the folder new, with a new head for these labels."""
    torch.manual_seed(13)
    logging.set_verbosity_error()  # it reports the other layers, and a head that is missing
    config = {"num_hidden_layers": 2, "id2label": dict(enumerate(labels))}
    encoder = CrossEncoder(str(folder), device="cpu", num_labels=len(labels), config_kwargs=config)
    encoder.save_pretrained(str(new), create_model_card=False)


def options_of(folder):
    """Return options to load a model from a folder, which may hold only a GGUF file."""
    options = {"trust_remote_code": False}
    for path in folder.glob("*.gguf"):
        options["gguf_file"] = path.name
    return options


@torch.no_grad()
def write_tiny(kind, new):
    """Write a tiny model to the folder new, with MiniLM's tokenizer and random weights."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM, model_max_length=512)
    torch.manual_seed(13)
    if kind == "tiny-monot5":
        sizes = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
        config = T5Config(
            vocab_size=len(tokenizer), decoder_start_token_id=0, dropout_rate=0, **sizes
        )
        model = T5ForConditionalGeneration(config)
    else:
        model_class, settings = TINY_MODELS[kind]
        model = model_class(BertConfig(vocab_size=len(tokenizer), **TINY, **settings))
    if kind == "tiny-splade":
        text = Path("README.md").read_text(encoding="utf-8")
        logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
        highest = logits.amax(0).sort(descending=True).values
        model.cls.predictions.bias -= highest[ACTIVE]  # at and below it, a term has no weight
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)


def write_causal(folder, new, sizes):
    """Write a causal model to the folder new, with folder's config in other sizes."""
    options = options_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    config = AutoConfig.from_pretrained(folder, **options)
    config.update(sizes)
    torch.manual_seed(13)
    model = AutoModelForCausalLM.from_config(config)
    model.bfloat16().save_pretrained(new)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(new)
    encoder = CrossEncoder(
        str(new), device="cpu", prompts={"query": PROMPT}, default_prompt_name="query"
    )
    encoder.save_pretrained(str(new), create_model_card=False)


@torch.no_grad()
def write_llm(folder, new, reply=REPLY):
    """Write a language model to the folder new, which answers every prompt with one reply.

    Only the last token decides which token follows: after the token that ends a prompt, the reply;
    after any other token, the end of the text.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, **options_of(folder))
    tokenizer.add_tokens([reply])
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(new)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    for weights in (*model.model.layers.parameters(), *model.lm_head.parameters()):
        weights.zero_()  # the layer adds nothing
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], return_dict=True)
    vectors = model.model.embed_tokens.weight
    vectors[:] = torch.eye(32)[0]
    vectors[prompt["input_ids"][-1]] = torch.eye(32)[1]
    model.lm_head.weight[tokenizer.eos_token_id, 0] = 9.0
    model.lm_head.weight[tokenizer.convert_tokens_to_ids(reply), 1] = 9.0
    model.save_pretrained(new)


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("folder", type=Path, help="write the model to this folder")
    parser.add_argument("--kind", choices=KINDS, default="cross-encoder",
        help="write a model of this kind (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    kit.check_outs(args.folder, is_folder=True)
    if "arguments" in kit.sidecar_of(args.folder):  # stand-ins have none
        kit.fail(args.folder, "a model that this script has not made; give another folder")
    with kit.written(args.folder, {}) as new:
        if args.kind == "causal":
            write_causal(SMOLLM2, new, SIZES)
        elif args.kind == "tiny-causal":
            write_causal(SMOLLM2, new, TINY | {"num_key_value_heads": 1, "head_dim": 8})
        elif args.kind.startswith("tiny"):
            write_tiny(args.kind, new)
        elif args.kind == "llm":
            write_llm(SMOLLM2, new)
        elif args.kind == "nli":
            write_encoder(MINILM, new, NLI)
        else:
            write_encoder(MINILM, new, ["LABEL_0"])
    print(f"{args.folder}: {args.kind}, a stand-in")


if __name__ == "__main__":
    kit.call(main)
