"""docs/evidence.md: every claim of the paper, its numbers, ours on the embedded models, and a verdict.

python -m clustrs_paper.evidence run mini-llava          measure a model; stopped, the same command resumes
python -m clustrs_paper.evidence store mini-llava        store the results in docs/results/evidence, in compact form
python -m clustrs_paper.evidence page                    write docs/evidence.md and the tables of place and weight
"""
