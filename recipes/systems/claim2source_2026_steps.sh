# The steps of claim2source_2026.sh, a function each. They take $PAPERS and the models from there.
# both_ways MODEL OUT: a copy of an encoder in which tokens attend in both directions, with mean
# pooling, unless it is there; GritLM then needs no code of its own
both_ways() {
  [ -d "$2" ] || python -c 'import os, sys
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
body = Transformer(sys.argv[1])
body.config.is_causal = False
pooling = Pooling(body.get_embedding_dimension(), "mean")
SentenceTransformer(modules=[body, pooling], device="cpu").save_pretrained(sys.argv[2] + ".new")
os.rename(sys.argv[2] + ".new", sys.argv[2])' "$1" "$2"
}

# posts SPLIT: its posts in English; with the original before; with a label between both
posts() {
  local view=$WORK/$1/claims
  local how="--max-tokens 512 --replies $view.translation.replies.jsonl
    --extra {\"chat_template_kwargs\":{\"enable_thinking\":false}}"
  translate $1 $how
  translate $1 $how --append --out $view.both.tsv
  translate $1 $how --append "In English: " --out $view.labelled.tsv
}

# rerank SPLIT: Qwen3-Reranker orders them by the translations
rerank() {
  kit 03_rerank.py $D --split $1 --claims $WORK/$1/claims.translation.tsv $PAPERS --model $QWEN \
    --run $WORK/$1/dense.tsv --depth 100 --top-k 100 --max-length 8192 --prompt "$ABOUT"
}

# choose SPLIT: a language model names one of the best ten, which moves to the first place
choose() {
  kit 04_llm_rerank.py $D --split $1 --claims $WORK/$1/claims.labelled.tsv $PAPERS $CHOICE \
    --depth 10 --window 10 --best 1 --alpha 0 --prompt $PROMPTS/one-of-ten.txt --max-tokens 4096 \
    --out $WORK/$1/chosen.tsv
}
