"""The paper's claims."""

from dataclasses import replace

from clustrs_paper.evidence import paper
from clustrs_paper.evidence.checks import (
    ABLATION,
    BUDGETS,
    C_H,
    CLIP,
    CLUSTERING,
    MAIN_GROUPS,
    RIVALS,
    SAME,
    SIGLIP,
    TAU,
    Above,
    Below,
    Claim,
    Within,
    changed,
    compared,
    cost,
    falls_more,
    geometry,
    kept_again,
    leads,
    matched,
    nearer,
    over_budgets,
    ranking,
    shrinkage,
    varied,
)
from clustrs_paper.evidence.results import lead

CLAIMS = (
    Claim(
        "Ranking by attention falls apart under noise",
        "Mild noise replaces most of the tokens that CLS attends to most; from sigma 1 on, none of them stays.",
        (ranking("0.1", Below(50.0)), ranking("1", Below(10.0)), ranking("3", Below(10.0))),
    ),
    Claim(
        "So do the answers",
        "With few tokens or strong noise, that brittleness surfaces as a sharp drop of pruning by attention: it loses "
        "more than others do.",
        (
            falls_more("clustrs", 16, "ClustRS", "gaussian 3", "the strongest Gaussian noise, k = 16"),
            falls_more("clustrs", 16, "ClustRS", "noise", "noise, k = 16"),
            falls_more("none", None, "all tokens", "noise", "noise, k = 16"),
        ),
    ),
    Claim(
        "Clustering makes the choice stable",
        "Balancing salience and diversity stabilizes what is chosen against noise.",
        (kept_again("0.1"), kept_again("1")),
    ),
    Claim(
        "Better than attention and diversity with 16 tokens, clean images",
        "ClustRS leads FasterVLM, DivPrune and VisionZip by 3 to 6 points.",
        leads(16, {"clean": "clean images"}),
    ),
    Claim(
        "Better than attention and diversity with 16 tokens, under noise",
        "The lead is largely kept under Gaussian and salt-and-pepper noise.",
        leads(16, {name: text for name, text in MAIN_GROUPS.items() if name != "clean"}),
    ),
    Claim(
        "Better with 16 tokens under other corruptions",
        "Brightness, contrast, cutout, motion blur and JPEG show the same.",
        leads(16, {"other": "other corruptions"}),
    ),
    Claim(
        "Better with 50 tokens",
        "Best on clean images, under salt and pepper, and under most other corruptions; variable under Gaussian noise.",
        leads(50, {"clean": "clean images", "salt_pepper": "salt and pepper", "other": "other corruptions"}),
    ),
    Claim(
        "The lead shrinks at large k",
        "At k = 144 the differences between the methods become smaller.",
        tuple(
            compared(
                f"all conditions, lead over {name} at k = 16 minus that at k = 144",
                changed(lead("clustrs", rival, 16, "all"), lead("clustrs", rival, 144, "all")),
            )
            for rival, name in RIVALS.items()
        ),
    ),
    Claim(
        "The Huber distance is critical for robustness",
        "C+H is better than the same clustering with the Euclidean distance, under Gaussian noise.",
        tuple(
            compared(
                f"Gaussian noise, k = {k}, C+H minus Clustering", lead(C_H, CLUSTERING, k, "gaussian"), tables=ABLATION
            )
            for k in BUDGETS
        ),
    ),
    Claim(
        "Residual shrinkage (RRS) gains at small k",
        "At k = 16 it improves the score under all levels of Gaussian noise.",
        tuple(
            compared(f"{text}, k = 16, with minus without RRS", shrinkage(16, group), tables=ABLATION)
            for group, text in {
                "gaussian": "Gaussian noise",
                "gaussian 1": "mildest Gaussian noise",
                "gaussian 3": "strongest Gaussian noise",
            }.items()
        ),
    ),
    Claim(
        "RRS gains less at larger k",
        "The benefit diminishes as the budget grows.",
        tuple(
            compared(
                f"Gaussian noise, gain at k = 16 minus that at k = {k}",
                changed(shrinkage(16, "gaussian"), shrinkage(k, "gaussian")),
                tables=ABLATION,
            )
            for k in (50, 144)
        ),
    ),
    Claim(
        "RRS gains more under more noise",
        "At k = 16 its gain grows from the mildest to the strongest noise.",
        (
            compared(
                "k = 16, gain under the strongest minus that under the mildest Gaussian noise",
                changed(shrinkage(16, "gaussian 3"), shrinkage(16, "gaussian 1")),
                tables=ABLATION,
            ),
        ),
    ),
    Claim(
        "RRS removes noise from the tokens",
        "A kept token comes nearer to what it would be without noise.",
        (nearer("0.1"), nearer("0.5"), nearer("1.0"), nearer("3.0")),
    ),
    Claim(
        "SigLIP's attention is flat, norms restore the contrast",
        "CLIP's largest attention score is about 5 times the median, SigLIP's about 2 times; with the norm-aware "
        "salience it is about 4 times.",
        (
            geometry("largest attention score", "attention_ratio", Below(3.5), 2.0),
            geometry("largest score with salience", "salience_ratio", Above(3.0, negligible=0), 4.0),
        ),
        (SIGLIP,),
    ),
    Claim(
        "SigLIP needs the salience",
        "Without it, ClustRS falls by 13 points at k = 16 on clean images.",
        (
            replace(
                varied(
                    "clean images, k = 16, with minus without salience",
                    lead("clustrs salience=true", "clustrs salience=false", 16, "clean"),
                    Above(),
                    (),
                ),
                paper=paper.salience_gain(),
            ),
            varied(
                "all conditions and budgets, with minus without salience",
                over_budgets("clustrs salience=true", "clustrs salience=false"),
                Above(),
                (),
            ),
        ),
        (SIGLIP,),
    ),
    Claim(
        "With SigLIP the lead is larger",
        "On OneVision ClustRS leads FasterVLM and DivPrune clearly, clean and under salt and pepper.",
        tuple(
            check
            for keep in (16, 50)
            for check in leads(
                keep,
                {"clean": "clean images", "salt_pepper": "salt and pepper"},
                ("fastervlm", "divprune"),
                model=paper.ONEVISION,
            )
        ),
        (SIGLIP,),
    ),
    Claim(
        "Under a third of the tokens is enough with SigLIP",
        "Under mild noise 50 tokens of ClustRS match 180 of FasterVLM or DivPrune.",
        (matched("fastervlm"), matched("divprune")),
        (SIGLIP,),
    ),
    Claim(
        "tau: a plateau from 0.5 to 2",
        "Between these values the mean score hardly changes.",
        tuple(
            varied(
                f"mean of all, tau = {t} minus tau = 1", over_budgets(f"clustrs tau={t}", "clustrs"), Within(SAME), TAU
            )
            for t in ("0.5", "2")
        ),
    ),
    Claim(
        "tau: worse at 0.25 and 4",
        "Very small and very large thresholds lose.",
        tuple(
            varied(f"mean of all, tau = 1 minus {t}", over_budgets("clustrs", f"clustrs tau={t}"), Above(), TAU)
            for t in ("0.25", "4")
        ),
    ),
    Claim(
        "Clipping alpha is essential",
        "Without it (0 to 1) the mean score falls.",
        (varied("mean of all, 0.1-0.95 minus 0-1", over_budgets("clustrs", "clustrs clip=0-1"), Above(), CLIP),),
    ),
    Claim(
        "Which moderate interval does not matter",
        "0.05-0.95 and 0.2-0.9 score as the default does.",
        tuple(
            varied(
                f"mean of all, {interval} minus 0.1-0.95",
                over_budgets(f"clustrs clip={interval}", "clustrs"),
                Within(SAME),
                CLIP,
            )
            for interval in ("0.05-0.95", "0.2-0.9")
        ),
    ),
    Claim(
        "The cost is negligible",
        "At k = 16 vision tower and pruning together take 1 ms more than with the fastest competitor, 1.6 % of an "
        "answer of 64 tokens.",
        (
            cost("visual overhead, k = 16", Below(1.1), "16", paper.overhead_ratio(16), of_answer=False),
            cost(
                "share of an answer of 64 tokens at k = 16", Below(5.0), "16", paper.overhead_share(16), of_answer=True
            ),
        ),
    ),
    Claim(
        "ScienceQA: small differences between the methods",
        "On multiple-choice questions that can often be answered without the image, margins are small.",
        note="it takes a model that knows school science; `clustrs eval --config paper/scienceqa-gaussian` measures it",
    ),
    Claim(
        "MM-Vet: the absolute scores",
        "LLaVA-1.5-7B keeps a score of 0.27 with 16 tokens, OneVision one of 0.35 with 50.",
        note="it takes those models and a judge; `clustrs eval --config paper/mmvet-gaussian` measures it",
    ),
)
