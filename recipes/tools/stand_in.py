# /// script
# requires-python = ">=3.11"
# dependencies = ["gguf==0.19.0", "sentence-transformers==6.2.0", "torch==2.13.0",
#   "transformers==5.23.0"]
# ///
"""
Write a small reranker, NLI model or language model that replaces large ones in a rehearsal.

Reads   the tokenizer of data/models/minilm (BERT); --kind causal, llm: that of data/models/smollm2
Writes  FOLDER: a BERT of two layers with weights set by hand, 8 million parameters, one logit (nli:
        three); --kind causal: a SmolLM2 of four layers, untrained; --kind llm: a Llama of one layer
        that gives the same reply, with an order, a label and a text, to every prompt

Examples
    python recipes/tools/stand_in.py work/small/cross-encoder
    python recipes/tools/stand_in.py work/small/causal --kind causal

The causal reranker has the modules and the template of a large one, but ranks at random.
No package on PyPI holds a small cross-encoder, and a few dozen claims are too few to train one.
The BERT computes how many words of the claim occur in the abstract, weighted by rarity:

    layer 1   each word of the claim attends to itself in the abstract, or to [SEP] if absent
    layer 2   [CLS] attends to the words of the claim, by rarity, and averages what they found

Each feature f is stored as f and -f, so the mean of a vector is 0. The features of a token have
length 1. So layer norms change nothing.
"""

import argparse
import math
import os
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

SIZE = 128  # features of a token
WORDS = 120  # the first ones tell words apart; then, by index:
CLAIM = 120  # in the claim
ABSTRACT = 121  # in the abstract
SEP = 122  # is [SEP]
RARE = 123  # rarity of the word
FOUND = 124  # written by layer 1: the word occurs in the abstract
SCORE = 125  # written by layer 2
REST = 126  # what is missing to length 1
WORD_SQUARED = 0.3  # squared lengths of features
SEGMENT_SQUARED = 0.2
SEP_SQUARED = 0.3
RARE_SQUARED = 0.3
SAME = 14  # logits of layer 1: the same word
ABSENT = 9  # [SEP]
NEVER = 30  # outside the abstract
WEIGHT = 6  # logit of layer 2 between the rarest and the most frequent word
FOUND_SCALE = 0.1  # small, because it adds to the length, as does the next
SCORE_SCALE = 0.3
FIRST = 1996  # in BERT's vocabulary, words by frequency come after marks and letters
LAYERS = 4  # SmolLM2 has 30
ROOT = math.sqrt(2 * SIZE)  # attention divides logits by it
PROMPT = "Judge whether the document is evidence about the query. Answer yes or no."
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
REPLY = "[2] > [1]\n1: 1\n<text>a claim</text>"  # one token of the language model


def rarity(vocabulary):
    """Return (vocabulary,) rarities from 0 to 1: 1 + ln(w) / 6, w = (ln rank / ln last rank)^2."""
    rank = (torch.arange(vocabulary) - FIRST + 2).clamp(min=1).float()
    weight = (rank.log() / rank[-1].log()) ** 2
    return (1 + weight.log() / WEIGHT).clamp(min=0)


def word_features(vocabulary, cls, sep):
    """Return (vocabulary, SIZE) features; with that of the segment, each row has length 1."""
    table = torch.zeros(vocabulary, SIZE)
    words = torch.randn(vocabulary, WORDS, generator=torch.Generator().manual_seed(13))
    table[:, :WORDS] = math.sqrt(WORD_SQUARED) * words / words.norm(dim=1, keepdim=True)
    table[:, RARE] = math.sqrt(RARE_SQUARED) * rarity(vocabulary)
    table[[cls, sep], : RARE + 1] = 0.0
    table[sep, SEP] = math.sqrt(SEP_SQUARED)
    table[:, REST] = (1 - SEGMENT_SQUARED - table.square().sum(dim=1)).sqrt()
    return table


def fill(linear, rows):
    """Set a linear layer to {row: {feature: weight}}, else 0; the feature "bias" is a constant."""
    linear.weight.zero_()
    linear.bias.zero_()
    for row, weights in rows.items():
        for feature, weight in weights.items():
            if feature == "bias":
                linear.bias[row] = weight
            else:
                linear.weight[row, feature] = weight


def attend(layer, query, key, value, out):
    """Set the attention of a layer, which writes value, {feature: weight}, to the feature out."""
    fill(layer.attention.self.query, query)
    fill(layer.attention.self.key, key)
    fill(layer.attention.self.value, {0: value})
    fill(layer.attention.output.dense, {out: {0: 1.0}, SIZE + out: {0: -1.0}})
    layer.output.dense.weight.zero_()  # no feed-forward part until the model is trained


def config_of(vocabulary, nli):
    """Return the configuration of the BERT."""
    labels = ["entailment", "neutral", "contradiction"] if nli else ["LABEL_0"]
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=2 * SIZE,
        id2label=dict(enumerate(labels)),
        pad_token_id=0,
        label2id={label: index for index, label in enumerate(labels)},
    )


def set_embeddings(embeddings, features, segments):
    """Set the embeddings of words and segments; segments: the features of the two."""
    embeddings.word_embeddings.weight.copy_(torch.cat([features, -features], dim=1))
    embeddings.position_embeddings.weight.zero_()
    embeddings.token_type_embeddings.weight.zero_()
    length = math.sqrt(SEGMENT_SQUARED)
    for segment, feature in enumerate(segments):
        embeddings.token_type_embeddings.weight[segment, feature] = length
        embeddings.token_type_embeddings.weight[segment, SIZE + feature] = -length


def set_layers(first, second):
    """Set layer 1, which finds words in the abstract, and layer 2, which averages over them."""
    claim = {CLAIM: 1 / math.sqrt(SEGMENT_SQUARED)}  # each reads its feature as 1
    abstract = {ABSTRACT: 1 / math.sqrt(SEGMENT_SQUARED)}
    mark = {SEP: 1 / math.sqrt(SEP_SQUARED)}
    rare = {RARE: 1 / math.sqrt(RARE_SQUARED)}
    query = {row: {row: ROOT * SAME / WORD_SQUARED} for row in range(WORDS)}
    query[WORDS] = {"bias": -ROOT * NEVER}
    query[WORDS + 1] = {"bias": ROOT * ABSENT}
    key = {row: {row: 1.0} for row in range(WORDS)}
    key[WORDS] = claim
    key[WORDS + 1] = mark
    found = {
        ABSTRACT: FOUND_SCALE / math.sqrt(SEGMENT_SQUARED),
        SEP: -FOUND_SCALE / math.sqrt(SEP_SQUARED),
    }
    attend(first, query, key, found, FOUND)
    query = {0: {"bias": ROOT * WEIGHT}, 1: {"bias": -ROOT * NEVER}}
    key = {0: rare, 1: abstract}
    attend(second, query, key, {FOUND: SCORE_SCALE / FOUND_SCALE}, SCORE)


@torch.no_grad()
def build(vocabulary, cls, sep, nli):
    """Return the model. In NLI, the abstract comes first; it never says contradiction."""
    torch.manual_seed(13)
    model = BertForSequenceClassification(config_of(vocabulary, nli))
    segments = (ABSTRACT, CLAIM) if nli else (CLAIM, ABSTRACT)
    set_embeddings(model.bert.embeddings, word_features(vocabulary, cls, sep), segments)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.fill_(1 / math.sqrt(SIZE))  # the standard deviation of the vectors
    set_layers(*model.bert.encoder.layer)
    model.bert.pooler.dense.weight[0].zero_()
    model.bert.pooler.dense.weight[0, SCORE] = 2.0
    model.classifier.weight.zero_()
    model.classifier.weight[0, 0] = 16.0
    model.classifier.bias.fill_(-4.0)
    model.classifier.bias[1:2] = 0.0  # neutral, unless most words are found
    return model


def write_bert(folder, new, nli):
    """Write the BERT to the folder new, with the tokenizer of folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = build(len(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id, nli)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)


def options_of(folder):
    """Return how to load from a folder, which may hold a GGUF file alone."""
    options = {"trust_remote_code": False}
    for path in folder.glob("*.gguf"):
        options["gguf_file"] = path.name
    return options


def write_causal(folder, new):
    """Write a causal model to the folder new, as a CrossEncoder: folder's config, few layers."""
    from sentence_transformers import CrossEncoder

    options = options_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    config = AutoConfig.from_pretrained(folder, **options)
    config.num_hidden_layers = LAYERS
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

    The last token alone decides the next one: behind the one that ends a prompt comes the reply,
    behind any other one the end.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("folder", type=Path, help="write the model to this folder")
    parser.add_argument("--kind", choices=("cross-encoder", "nli", "causal", "llm"),
        default="cross-encoder", help="write a model of this kind (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    new = args.folder.with_name(f"{args.folder.name}.tmp-{os.getpid()}")
    if args.kind == "causal":
        write_causal(Path("data/models/smollm2"), new)
    elif args.kind == "llm":
        write_llm(Path("data/models/smollm2"), new)
    else:
        write_bert(Path("data/models/minilm"), new, args.kind == "nli")
    shutil.rmtree(args.folder, ignore_errors=True)
    os.replace(new, args.folder)
    print(f"{args.folder}: {args.kind}, a stand-in")


if __name__ == "__main__":
    main()
