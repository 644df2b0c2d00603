"""Which label sets can a classifier ever predict? Every answer comes with a proof that anyone can check."""

from .all_classes import verify_classes
from .all_sets import verify_all
from .all_sets_report import AllSetsReport
from .certificate import Certificate, Verdict
from .check import Proof
from .pipeline import verify
from .repair import HeadPlan, Repair
from .report import CheckResult, Report, StageReport

__all__ = [
    "AllSetsReport",
    "Certificate",
    "CheckResult",
    "HeadPlan",
    "Proof",
    "Repair",
    "Report",
    "StageReport",
    "Verdict",
    "verify",
    "verify_all",
    "verify_classes",
]
