"""docs/evidence.md: every claim of the paper, its numbers, ours on the embedded models, and a verdict.

python -m tools.evidence run mini-llava          measure a model; stopped, the same command resumes
python -m tools.evidence store mini-llava        put what was measured into docs/results/evidence, in compact form
python -m tools.evidence page                    write docs/evidence.md and the README's first table from it
"""
