"""The conformance kit: checks kernels against all requirements of the core, and reports the findings in a table.

::

    tokenspeed-kernel verify --plugin my-kernels --junit report.xml --output report.json

or, in a test of the package that has the kernels::

    @pytest.mark.parametrize("finding", conformance(plugin="my-kernels"), ids=str)
    def test_conformance(finding):
        assert not finding.wrong, finding.detail
"""

from tokenspeed_kernel.workbench.numerics.conformance.runner import (
    CHECKS,
    Finding,
    Options,
    conform,
    conformance,
    junit,
    only_where,
    plugin_kernels,
)

__all__ = ["CHECKS", "Finding", "Options", "conform", "conformance", "junit", "only_where", "plugin_kernels"]
