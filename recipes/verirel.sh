#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for Scientific Fact Checking"
# (CIKM 2025), on SciFact. For one A100.
# In small, within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS, a model class of its own
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
SPLIT=dev; [ -e "$DATA/qrels.dev.tsv" ] || SPLIT=test  # SciFact's test labels are not public: its dev split is measured
V=$WORK/$SPLIT
[ -d "$DATA" ] || python data/download.py scifact --out $DATA

stage "1, 2  Candidates: BM25, the best 100"
python 01_index.py $D --indexes bm25
python 02_retrieve.py $D --split train --retrievers bm25 --top-k 100
python 02_retrieve.py $D --split $SPLIT --retrievers bm25 --top-k 100

stage "5  Verifier: learns from the judged pairs and, as NEI, from 20 unjudged candidates a claim"
python 05_classify.py train $D --model $VERIFIER --negatives 20 --loss cross-entropy --sampler balanced --epochs 5 \
  --lr 1e-5 --schedule linear --batch-size 16 $(small --negatives 2 --epochs 1 --max-length 64 --lr 1e-4)

stage "3  ComboScorer (eq. 4, 5): half monoT5's relevance, half the verifier's P(SUPPORTS) + P(REFUTES)"
for split in train $SPLIT; do
  python 03_rerank.py $D --split $split --run $WORK/$split/bm25.tsv --model $MONO_T5 --verifier $WORK/models/classifier \
    --alpha 0.5 --depth 100 --out $WORK/$split/combo.tsv $(small --depth 10 --max-length 256)
done

stage "3  +VeriRel: SciBERT learns that score for the best 20, and 1 for gold evidence (L1)"
python 03_rerank.py train $D --recipe distil --model $SCIBERT --run $WORK/train/combo.tsv --depth 20 --lr 1e-5 \
  --batch-size 64 --epochs 10 --dev-split none $(small --epochs 1 --max-length 64 --batch-size 16)
python 03_rerank.py $D --split $SPLIT --run $V/bm25.tsv --depth 100 --out $V/verirel.tsv $(small --depth 20 --max-length 256)

stage "5, 6  Verdicts on the best 10; the table"
python 05_classify.py $D --split $SPLIT --run $V/verirel.tsv --top-k 10 $(small --max-length 64)
python 06_evaluate.py $D --split $SPLIT $V/{bm25,combo,verirel,verdicts}.tsv --measures verirel

# Published, SciFact, per cent:   R@1    R@3    R@5   R@10
#   BM25                        35.41  48.33  55.50  61.24
#   monoT5-3B                   55.02  70.33  78.47  85.65
#   +VeriRel                    62.20  75.60  82.30  87.08
