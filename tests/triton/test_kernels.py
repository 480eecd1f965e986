"""The kernel table."""

from codegen.cpp.kernels import KERNELS as CPP
from codegen.triton.kernels import KERNELS


def test_what_has_a_kernel_on_cpus_has_one_on_gpus() -> None:
    assert KERNELS.keys() == CPP.keys()
