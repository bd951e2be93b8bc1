"""The paper's studies as a library: each module has a frozen config and `run(config) -> StudyResult`.

from clustrs_paper.studies import stability

result = stability.run(stability.StabilityConfig(keep=16, count=10))
print(result.findings)
result.save("out/stability")
"""

from clustrs_paper.studies.result import StudyPart, StudyResult

__all__ = ["StudyPart", "StudyResult"]
