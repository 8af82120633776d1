"""Notices of clouds that they will reclaim this machine.

metadata server  →  Aws, Gcp, Azure (`poll`)  →  NoticePoller (a thread)  →  StopListener
"""

from reprieve.preemption.notices.detection import detect_clouds
from reprieve.preemption.notices.poller import Notice, NoticePoller

__all__ = ["Notice", "NoticePoller", "detect_clouds"]
