"""
Write a small cross-encoder with weights set by hand, to stand in for the large ones while a recipe is rehearsed.

Reads   data/models/minilm: its tokenizer (BERT's)
Writes  FOLDER: a BERT of two layers with one logit, 8 million parameters, as the large ones are loaded

Example
    python recipes/stand_in.py work/small/cross-encoder

No small cross-encoder comes in a package, and a few dozen claims cannot teach one: it learns by heart which abstracts
were right. This one computes what can be written down, how much of the claim the abstract holds, rare words first:

    layer 1   each word of the claim looks for itself in the abstract; what is not there goes to [SEP]
    layer 2   [CLS] asks the claim's words what they found, and listens the more the rarer they are

A feature f is stored twice, as f and as -f, so that vectors have mean 0, and every token's features have length 1: a
layer norm then changes nothing.
"""
import argparse
import math
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

# Features: 120 that tell words apart, then one each
WORDS, CLAIM, ABSTRACT, SEP, RARE, FOUND, SCORE, REST, SIZE = 120, 120, 121, 122, 123, 124, 125, 126, 128
WORD2, SEGMENT2, SEP2, RARE2 = 0.3, 0.2, 0.3, 0.3  # squares of their lengths, no more than 1 together; REST has what is left
SAME, ABSENT, NEVER = 14, 9, 30                    # logits of layer 1: the word itself, [SEP], anything but the abstract
WEIGHT = 6                                         # of layer 2: e^6 between the rarest word and none
FOUND_SCALE, SCORE_SCALE = 0.1, 0.3                # small, as they add to the length
FIRST = 1996                                       # BERT's vocabulary holds marks and letters first, then words by frequency

def rarity(vocabulary):
    """(vocabulary,) from 0, marks and single letters, to 1: 1 + ln(w) / 6 with w = (ln place / ln last place) squared."""
    place = (torch.arange(vocabulary) - FIRST + 2).clamp(min=1).float()
    weight = (place.log() / place[-1].log()) ** 2
    return (1 + weight.log() / WEIGHT).clamp(min=0)

def word_features(vocabulary, cls, sep):
    """(vocabulary, SIZE) features of length 1 together with those of the segment."""
    table = torch.zeros(vocabulary, SIZE)
    words = torch.randn(vocabulary, WORDS, generator=torch.Generator().manual_seed(13))
    table[:, :WORDS] = math.sqrt(WORD2) * words / words.norm(dim=1, keepdim=True)
    table[:, RARE] = math.sqrt(RARE2) * rarity(vocabulary)
    table[[cls, sep], :RARE + 1] = 0.0
    table[sep, SEP] = math.sqrt(SEP2)
    table[:, REST] = (1 - SEGMENT2 - table.square().sum(dim=1)).sqrt()
    return table

def attend(layer, query, key, value, out):
    """Set a layer's attention: rows of query and key, {row: {feature: weight}} with "bias" for a constant; value, {feature:
    weight}, is what goes to feature out."""
    parts = layer.attention.self
    for linear, rows in ((parts.query, query), (parts.key, key), (parts.value, {0: value})):
        linear.weight.zero_(), linear.bias.zero_()
        for row, weights in rows.items():
            for feature, weight in weights.items():
                if feature == "bias":
                    linear.bias[row] = weight
                else:
                    linear.weight[row, feature] = weight
    dense = layer.attention.output.dense
    dense.weight.zero_(), dense.bias.zero_()
    dense.weight[out, 0], dense.weight[SIZE + out, 0] = 1.0, -1.0
    layer.output.dense.weight.zero_()  # the feed-forward part adds nothing, until it is trained

@torch.no_grad()
def build(vocabulary, cls, sep):
    """The model (see above)."""
    torch.manual_seed(13)
    config = BertConfig(vocab_size=vocabulary, hidden_size=2 * SIZE, num_hidden_layers=2, num_attention_heads=1,
                        intermediate_size=2 * SIZE, num_labels=1, pad_token_id=0)
    model = BertForSequenceClassification(config)
    embeddings, (first, second), pooler = model.bert.embeddings, model.bert.encoder.layer, model.bert.pooler.dense
    features = word_features(vocabulary, cls, sep)
    embeddings.word_embeddings.weight.copy_(torch.cat([features, -features], dim=1))
    embeddings.position_embeddings.weight.zero_()
    embeddings.token_type_embeddings.weight.zero_()
    segment = math.sqrt(SEGMENT2)
    for kind, feature in ((0, CLAIM), (1, ABSTRACT)):
        embeddings.token_type_embeddings.weight[kind, [feature, SIZE + feature]] = torch.tensor([segment, -segment])
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
        norm.weight.fill_(1 / math.sqrt(SIZE))  # the deviation of a vector whose features have length 1
    root = math.sqrt(2 * SIZE)  # attention divides by it
    claim, abstract, mark, rare = ({feature: 1 / math.sqrt(square)} for feature, square in (
        (CLAIM, SEGMENT2), (ABSTRACT, SEGMENT2), (SEP, SEP2), (RARE, RARE2)))
    attend(first, {**{row: {row: root * SAME / WORD2} for row in range(WORDS)}, WORDS: {"bias": -root * NEVER},
                   WORDS + 1: {"bias": root * ABSENT}},
           {**{row: {row: 1.0} for row in range(WORDS)}, WORDS: claim, WORDS + 1: mark},
           {ABSTRACT: FOUND_SCALE / segment, SEP: -FOUND_SCALE / math.sqrt(SEP2)}, FOUND)
    attend(second, {0: {"bias": root * WEIGHT}, 1: {"bias": -root * NEVER}}, {0: rare, 1: abstract},
           {FOUND: SCORE_SCALE / FOUND_SCALE}, SCORE)
    pooler.weight[0].zero_()
    pooler.weight[0, SCORE] = 2.0
    model.classifier.weight.zero_()
    model.classifier.weight[0, 0] = 16.0
    model.classifier.bias.fill_(-4.0)
    return model

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--tokenizer", default="data/models/minilm", help="a folder with BERT's tokenizer")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    temporary = args.folder.with_name(f"{args.folder.name}.tmp-{os.getpid()}")
    build(len(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(args.folder, ignore_errors=True)
    os.replace(temporary, args.folder)
    print(f"{args.folder}: a cross-encoder of written weights")

if __name__ == "__main__":
    main()
