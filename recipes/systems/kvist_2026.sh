#!/usr/bin/env bash
# Kvist et al. at CheckThat! 2026, task 1 (CLEF;
# https://github.com/mattiaskvist/check-that-clef-2026): third. Which of 10,000 papers is a post in
# English, French or German about? For one A100 of 80 GB; the data on request, translations and
# Nemotron from an endpoint each:
#   python data/download.py checkthat2026 --from FOLDER
#   export LLM_BASE_URL=http://localhost:8000/v1 RERANK_BASE_URL=http://localhost:8001/v1
#   bash recipes/systems/kvist_2026.sh
# Without RERANK_BASE_URL, bge-reranker-v2-gemma reranks, which needs no endpoint.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/kvist_2026.sh tables
#   JINA_BASE_URL=URL  rerank endpoint of jina-reranker-v3 (default: its rows are left out)
. "$(dirname "$0")/common.sh" checkthat2026
. recipes/systems/kvist_2026_steps.sh

HARRIER=$(model microsoft/harrier-oss-v1-27b $MINILM)
GEMMA=$(model BAAI/bge-reranker-v2-gemma $CAUSAL)
TRANSLATOR=$(llm utter-project/EuroLLM-9B-Instruct-2512)
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat2026 --out $DATA
fi
check "${1:-}"
SPLITS="train test"  # the forest learns on runs of train
if [ "${1:-}" = tables ] && [ -e $DATA/qrels.dev.tsv ]; then
  SPLITS="train dev test"
fi

stage "2  French and German posts are cleaned and get a translation (difference 44)"
for split in $SPLITS; do
  english $split
done

stage "1, 2  BM25+ over stems and pairs of words, titles eight times (difference 45)"
TITLES=title,title,title,title,title,title,title,title
python recipes/tools/texts.py $WORK/english $WORK/bigrams --bigrams
kit 01_index.py --data $WORK/bigrams --work $WORK --indexes bm25 --bm25-method bm25+ --delta 0 \
  --k1 2.5 --b 0.85 --fields $TITLES,abstract,authors,venue
for split in $SPLITS; do
  kit 02_retrieve.py --data $WORK/bigrams --work $WORK --split $split --retrievers bm25 --top-k 100
done

stage "1, 2  Harrier 27B (difference 46)"
PAPERS="--fields title,abstract,venue,authors"
WEB="Instruct: Given a web search query, retrieve relevant passages that answer the query"
kit 01_index.py $D --indexes dense --dense-model $HARRIER --batch-size 2 --max-length 512 $PAPERS \
  --query-prompt "$WEB"$'\nQuery: '
for split in $SPLITS; do
  kit 02_retrieve.py $D --split $split --retrievers dense --top-k 100
done

stage "2  A random forest learns on train to fuse both, and keeps 30 papers (difference 47)"
forest test

stage "3  Nemotron, or without its endpoint bge-reranker-v2-gemma, orders them (difference 48)"
# The rerankers that can answer; the first one makes the submission.
RERANKERS="${RERANK_BASE_URL:+nemotron} gemma ${JINA_BASE_URL:+jina}"
read -r FIRST REST <<< "$RERANKERS"
rerank test forest rerank $FIRST

stage "6  The table and the submission"
MEASURES="MRR@5 R@5 R@10 R@30 R@50"
table metrics "$MEASURES" $T/{bm25,dense,forest,rerank}.tsv
kit 06_evaluate.py submission $D $T/rerank.tsv --task $(checkthat_task)
further "${1:-}"

dev_or_test

stage "tables  Rows 1 to 6 of the ablation: BM25+ as its library has it, BGE-M3, both fusions"
kit 01_index.py $D --indexes bm25 --bm25-method bm25+ --delta 0 --k1 1.5 --b 0.75 \
  --fields $TITLES,abstract,authors,venue --out $WORK/index-library
kit 01_index.py $D --indexes dense --dense-model $(model BAAI/bge-m3 $MINILM) --max-length 512 \
  $PAPERS --out $WORK/index-bge-m3
for row in "library bm25" "bge-m3 dense"; do
  read -r NAME KIND <<< "$row"
  kit 02_retrieve.py $D --split $SPLIT --index $WORK/index-$NAME --retrievers $KIND --top-k 100 \
    --out $S/$NAME
  cp $S/$NAME/$KIND.tsv $S/$NAME.tsv
done
kit 02_retrieve.py fuse $D --split $SPLIT $S/{dense,bm25}.tsv --rrf-k 60 --top-k 30 \
  --out $S/rrf.tsv
forest $SPLIT
ROWS="library bm25 bge-m3 dense rrf forest"

stage "tables  Rows 7 to 13: rerankers on the forest, on reciprocal ranks, on Harrier alone"
for reranker in $RERANKERS; do
  for run in forest rrf; do
    rerank $SPLIT $run $run-$reranker $reranker
    ROWS="$ROWS $run-$reranker"
  done
done
rerank $SPLIT dense dense-$FIRST $FIRST
ROWS="$ROWS dense-$FIRST"

stage "tables  All posts; those of each language"
FILES=
for name in $ROWS; do
  FILES="$FILES $S/$name.tsv"
done
kit 06_evaluate.py $D --split $SPLIT $FILES --measures $MEASURES --out $S/tables.tsv
python recipes/tools/published.py $S/tables.json "$SYSTEM:CheckThat! 2026, dev"
python recipes/tools/languages.py $DATA $WORK/languages
for language in en fr de; do
  if [ -e $WORK/languages/$language/qrels.$SPLIT.tsv ]; then
    python 06_evaluate.py --data $WORK/languages/$language --work $WORK --split $SPLIT $FILES \
      --measures $MEASURES --out $S/$language.tsv
    python recipes/tools/published.py $S/$language.json "$SYSTEM:CheckThat! 2026, dev, $language"
  fi
done
remarks
