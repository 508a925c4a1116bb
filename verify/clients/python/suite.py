"""Tests of Python's own suites, one line each on how it went: suite.py SECONDS NAME..."""

import faulthandler
import sys
import unittest

# Of no connection within one host, or waiting for a device that answers nothing.
ELSEWHERE = ("VSOCK", "Vsock", "TIPC", "CAN", "RDS", "Bluetooth", "Qipcrtr", "UDPLITE")


class Tell(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.told = set()

    def tell(self, test, outcome):
        if test.id() not in self.told:
            self.told.add(test.id())
            print("outcome", test.id(), outcome, flush=True)

    def startTest(self, test):
        super().startTest(test)
        print("begins", test.id(), flush=True)

    def addSuccess(self, test):
        self.tell(test, "passed")

    def addError(self, test, error):
        super().addError(test, error)
        self.tell(test, "error")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.tell(test, "failed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.tell(test, "skipped")

    def addExpectedFailure(self, test, error):
        self.tell(test, "failed as expected")

    def addUnexpectedSuccess(self, test):
        self.tell(test, "passed unexpectedly")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.tell(test, "failed")


def each(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from each(test)
        elif not any(word in test.id() for word in ELSEWHERE):
            yield test


faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
loaded = unittest.TestLoader().loadTestsFromNames(sys.argv[2:])
# The suite object keeps class and module set-ups.
result = Tell()
unittest.TestSuite(each(loaded)).run(result)
for test, trace in result.errors + result.failures:
    print("why", test.id(), trace.replace("\n", " | "), flush=True)
print("outcome all ended", flush=True)
