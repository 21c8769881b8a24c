"""One update of tensors on the host by keywords, compiled or by the reference in torch."""

from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.native.reference_updates import run_reference
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.lion import lion_terms


def _run(rule, row, terms, threads):
    ratios = HostTable(rule, [row]).run([terms], threads=threads)
    return ratios[0] if ratios else 1.0


def adam(master, exp_avg, exp_avg_sq, grad, *, out=None, threads=1, **hyper):
    """Update master and both moments in place."""
    _run("adam", Row(master, (exp_avg, exp_avg_sq), grad, out), adam_terms(**hyper), threads)


def adam_reference(master, exp_avg, exp_avg_sq, grad, *, out=None, **hyper):
    """The same update in torch."""
    run_reference("adam", master, (exp_avg, exp_avg_sq), grad, out, adam_terms(**hyper))


def adagrad(master, square_sum, grad, **hyper):
    """Update master and the sum of squared gradients in place."""
    _run("adagrad", Row(master, (square_sum,), grad), adagrad_terms(**hyper), 1)


def lion(master, exp_avg, grad, **hyper):
    """Update master and momentum in place."""
    _run("lion", Row(master, (exp_avg,), grad), lion_terms(**hyper), 1)


def lamb(master, exp_avg, exp_avg_sq, grad, *, threads=1, **hyper):
    """Update one full tensor and both its moments in place; returns the trust ratio."""
    return _run("lamb", Row(master, (exp_avg, exp_avg_sq), grad), lamb_terms(**hyper), threads)
