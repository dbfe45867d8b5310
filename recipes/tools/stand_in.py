# /// script
# requires-python = ">=3.11"
# dependencies = ["gguf==0.19.0", "sentence-transformers==6.2.0", "torch==2.13.0",
#   "transformers==5.23.0"]
# ///
"""
Write a small reranker or NLI model, which replaces large ones in a rehearsal.

Reads   data/models/minilm: its tokenizer (BERT); --kind causal: that of data/models/smollm2
Writes  FOLDER: a BERT of two layers with weights set by hand, one logit or (nli) three, 8 million
        parameters; --kind causal: a SmolLM2 of four layers, untrained

Examples
    python recipes/tools/stand_in.py work/small/cross-encoder
    python recipes/tools/stand_in.py work/small/causal --kind causal

The causal reranker has the modules and the template of a large one, and ranks at random.
No package on PyPI holds a small cross-encoder, and a few dozen claims are too few to train one.
The BERT computes how much of the claim is found in the abstract, with rare words first:

    layer 1   each word of the claim attends to itself in the abstract, or to [SEP] if absent
    layer 2   [CLS] attends to the words of the claim, by rarity, and reads what they found

Each feature f is stored as f and -f, so vectors have mean 0. The features of each token have
length 1, so layer norms change nothing.
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
)

WORDS = 120  # features that tell words apart; the others are single ones
CLAIM, ABSTRACT, SEP, RARE, FOUND, SCORE, REST, SIZE = 120, 121, 122, 123, 124, 125, 126, 128
WORD2, SEGMENT2, SEP2, RARE2 = 0.3, 0.2, 0.3, 0.3  # squared lengths; REST fills up to 1
SAME, ABSENT, NEVER = 14, 9, 30  # logits of layer 1: the same word, [SEP], outside the abstract
WEIGHT = 6  # logit of layer 2 between the rarest and the most frequent word
FOUND_SCALE, SCORE_SCALE = 0.1, 0.3  # small, because they add to the length
FIRST = 1996  # in BERT's vocabulary, words by frequency follow after marks and letters
LAYERS = 4  # SmolLM2 has 30
PROMPT = "Judge whether the document is evidence about the query. Answer yes or no."
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def rarity(vocabulary):
    """Return (vocabulary,) rarities from 0 to 1: 1 + ln(w) / 6, w = (ln place / ln last)^2."""
    place = (torch.arange(vocabulary) - FIRST + 2).clamp(min=1).float()
    weight = (place.log() / place[-1].log()) ** 2
    return (1 + weight.log() / WEIGHT).clamp(min=0)


def word_features(vocabulary, cls, sep):
    """Return (vocabulary, SIZE) features, of length 1 together with those of the segment."""
    table = torch.zeros(vocabulary, SIZE)
    words = torch.randn(vocabulary, WORDS, generator=torch.Generator().manual_seed(13))
    table[:, :WORDS] = math.sqrt(WORD2) * words / words.norm(dim=1, keepdim=True)
    table[:, RARE] = math.sqrt(RARE2) * rarity(vocabulary)
    table[[cls, sep], : RARE + 1] = 0.0
    table[sep, SEP] = math.sqrt(SEP2)
    table[:, REST] = (1 - SEGMENT2 - table.square().sum(dim=1)).sqrt()
    return table


def fill(linear, rows):
    """Set a linear layer to {row: {feature: weight}}, with "bias" for a constant."""
    linear.weight.zero_()
    linear.bias.zero_()
    for row, weights in rows.items():
        for feature, weight in weights.items():
            if feature == "bias":
                linear.bias[row] = weight
            else:
                linear.weight[row, feature] = weight


def attend(layer, query, key, value, out):
    """Set the attention of a layer; value, {feature: weight}, is written to the feature out."""
    fill(layer.attention.self.query, query)
    fill(layer.attention.self.key, key)
    fill(layer.attention.self.value, {0: value})
    fill(layer.attention.output.dense, {out: {0: 1.0}, SIZE + out: {0: -1.0}})
    layer.output.dense.weight.zero_()  # no feed-forward part until the model is trained


@torch.no_grad()
def build(vocabulary, cls, sep, nli):
    """Return the model. In NLI, the abstract comes first; it never says contradiction."""
    torch.manual_seed(13)
    labels = ["entailment", "neutral", "contradiction"] if nli else ["LABEL_0"]
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=2 * SIZE,
        id2label=dict(enumerate(labels)),
        pad_token_id=0,
        label2id={label: place for place, label in enumerate(labels)},
    )
    model = BertForSequenceClassification(config)
    embeddings, (first, second) = model.bert.embeddings, model.bert.encoder.layer
    features, segment = word_features(vocabulary, cls, sep), math.sqrt(SEGMENT2)
    embeddings.word_embeddings.weight.copy_(torch.cat([features, -features], dim=1))
    embeddings.position_embeddings.weight.zero_()
    embeddings.token_type_embeddings.weight.zero_()
    for kind, feature in enumerate((ABSTRACT, CLAIM) if nli else (CLAIM, ABSTRACT)):
        embeddings.token_type_embeddings.weight[kind, feature] = segment
        embeddings.token_type_embeddings.weight[kind, SIZE + feature] = -segment
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.fill_(1 / math.sqrt(SIZE))  # the standard deviation of the vectors
    root = math.sqrt(2 * SIZE)  # attention divides by it
    claim, abstract = {CLAIM: 1 / SEGMENT2**0.5}, {ABSTRACT: 1 / SEGMENT2**0.5}
    mark, rare = {SEP: 1 / SEP2**0.5}, {RARE: 1 / RARE2**0.5}
    query = {row: {row: root * SAME / WORD2} for row in range(WORDS)}
    query |= {WORDS: {"bias": -root * NEVER}, WORDS + 1: {"bias": root * ABSENT}}
    key = {row: {row: 1.0} for row in range(WORDS)} | {WORDS: claim, WORDS + 1: mark}
    found = {ABSTRACT: FOUND_SCALE / segment, SEP: -FOUND_SCALE / math.sqrt(SEP2)}
    attend(first, query, key, found, FOUND)
    query = {0: {"bias": root * WEIGHT}, 1: {"bias": -root * NEVER}}
    attend(second, query, {0: rare, 1: abstract}, {FOUND: SCORE_SCALE / FOUND_SCALE}, SCORE)
    model.bert.pooler.dense.weight[0].zero_()
    model.bert.pooler.dense.weight[0, SCORE] = 2.0
    model.classifier.weight.zero_()
    model.classifier.weight[0, 0] = 16.0
    model.classifier.bias.fill_(-4.0)
    model.classifier.bias[1:2] = 0.0  # neutral, unless most words are found
    return model


def write_bert(folder, new, nli):
    """Write the BERT to new, with the tokenizer of folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = build(len(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id, nli)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)


def write_causal(folder, new):
    """Write a causal model of folder's kind with few layers to new, as a CrossEncoder."""
    from sentence_transformers import CrossEncoder

    name = (
        {} if (folder / "config.json").exists() else {"gguf_file": next(folder.glob("*.gguf")).name}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **name)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **name)
    config.num_hidden_layers = LAYERS
    torch.manual_seed(13)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer.chat_template = TEMPLATE
    for part in (model.bfloat16(), tokenizer):
        part.save_pretrained(new)
    encoder = CrossEncoder(
        str(new), device="cpu", prompts={"query": PROMPT}, default_prompt_name="query"
    )
    encoder.save_pretrained(str(new), create_model_card=False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument(
        "--kind",
        choices=("cross-encoder", "nli", "causal"),
        default="cross-encoder",
        help="what to write",
    )
    args = parser.parse_args()
    new = args.folder.with_name(f"{args.folder.name}.tmp-{os.getpid()}")
    if args.kind == "causal":
        write_causal(Path("data/models/smollm2"), new)
    else:
        write_bert(Path("data/models/minilm"), new, args.kind == "nli")
    shutil.rmtree(args.folder, ignore_errors=True)
    os.replace(new, args.folder)
    print(f"{args.folder}: {args.kind}, a stand-in")


if __name__ == "__main__":
    main()
