"""Clouds that say beforehand that they will take this machine away.

metadata server  →  Aws, Gcp, Azure (`poll`)  →  NoticePoller (a thread)  →  the guard
"""

from reprieve.preemption.notices.detection import detect_clouds
from reprieve.preemption.notices.poller import Notice, NoticePoller

__all__ = ["Notice", "NoticePoller", "detect_clouds"]
