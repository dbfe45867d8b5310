#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025), on SciFact. For one A100.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
SPLIT=dev; [ -e "$DATA/qrels.dev.tsv" ] || SPLIT=test  # SciFact's test labels are not public
V=$WORK/$SPLIT
[ -d "$DATA" ] || python data/download.py scifact --out $DATA

stage "1, 2  Candidates: the best 100 by BM25"
python 01_index.py $D --indexes bm25
python 02_retrieve.py $D --split train --retrievers bm25 --top-k 100
python 02_retrieve.py $D --split $SPLIT --retrievers bm25 --top-k 100

stage "5  Verifier: for each positive, N = 5 negatives drawn at random from BM25's best 100"
python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape labels --hard 5 \
  --from-top 100 --pool unjudged --out $WORK/train/verifier.jsonl $(small --hard 2)
python 05_classify.py train $D --model $VERIFIER --examples $WORK/train/verifier.jsonl \
  --loss cross-entropy --sampler shuffle --epochs 5 --lr 1e-5 --schedule linear --batch-size 16 \
  $(small --epochs 1 --max-length 64 --lr 1e-4)

stage "3  ComboScorer (eq. 4, 5): half monoT5, half the verifier's P(SUPPORTS) + P(REFUTES)"
for split in train $SPLIT; do
  python 05_classify.py $D --split $split --run $WORK/$split/bm25.tsv --top-k 100 \
    --out $WORK/$split/feedback.tsv $(small --top-k 10 --max-length 64)
  python 03_rerank.py $D --split $split --run $WORK/$split/bm25.tsv --model $MONO_T5 --depth 100 \
    --verdicts $WORK/$split/feedback.tsv --alpha 0.5 --out $WORK/$split/combo.tsv \
    $(small --depth 10 --max-length 256)
done

stage "3  +VeriRel: SciBERT learns that score for the best 20, and 1 for gold evidence (L1)"
python 02_retrieve.py mine $D $WORK/train/combo.tsv --targets score --middle 0.5 --scale 1 \
  --from-top 20 --gold --keep-claims-without-evidence --out $WORK/train/student.jsonl
python 03_rerank.py train $D $WORK/train/student.jsonl --model $SCIBERT --loss l1 --lr 1e-5 \
  --batch-size 64 --epochs 10 --dev-split none $(small --epochs 1 --max-length 64 --batch-size 16)
python 03_rerank.py $D --split $SPLIT --run $V/bm25.tsv --depth 100 --out $V/verirel.tsv \
  $(small --depth 20 --max-length 256)

stage "5, 6  Verdicts on the best 10; the table"
python 05_classify.py $D --split $SPLIT --run $V/verirel.tsv --top-k 10 --out $V/verdicts.tsv \
  $(small --max-length 64)
python 06_evaluate.py $D --split $SPLIT $V/{bm25,combo,verirel,verdicts}.tsv --measures verirel

# Published, SciFact (279 test claims), per cent:   R@1    R@3    R@5   R@10
#   BM25                                          35.41  48.33  55.50  61.24
#   monoT5-3B                                     55.02  70.33  78.47  85.65
#   +VeriRel, N = 5                               62.20  75.60  82.30  87.08
