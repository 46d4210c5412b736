"""What the next step does: budget, fairness, preemption. It knows no device."""

from tandem.schedule.scheduler import Scheduler, SchedulerStatistics

__all__ = ["Scheduler", "SchedulerStatistics"]
