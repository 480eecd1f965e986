"""The GPU targets: plan.json's launches, run by an executor over one small interface to a device."""
