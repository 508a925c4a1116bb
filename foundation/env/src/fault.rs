//! Fault points: named spots where a test can make the program fail, stop or die.
//!
//! ```
//! use beeline_env::{FaultPoint, FaultAction, fault};
//! static BEFORE_PERSIST: FaultPoint = FaultPoint::new("example.append.before_persist");
//! fn append() -> std::io::Result<()> {
//!     BEFORE_PERSIST.check()?;
//!     Ok(())
//! }
//! assert!(append().is_ok());
//! let armed = fault::arm("example.append.before_persist", FaultAction::Fail, 1);
//! assert!(append().is_ok(), "the first pass is let through");
//! assert!(append().is_err());
//! drop(armed);
//! ```
//!
//! Cost where nothing is armed: one relaxed load of a static that nobody writes, and a branch that
//! is never taken. Names are global to the process: tests in one binary arm different points, or
//! run their faults in a child process through [`ENVIRONMENT_VARIABLE`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// `name=action[@skip]`, several separated by commas; actions are `fail`, `crash`, `hold` and
/// `delay:MILLISECONDS`. Read by [`arm_from_environment`].
pub const ENVIRONMENT_VARIABLE: &str = "BEELINE_FAULTS";

/// Number of armed points; the only thing an unarmed [`FaultPoint::check`] looks at.
static ARMED: AtomicU32 = AtomicU32::new(0);

static POINTS: Mutex<Option<HashMap<String, Armed>>> = Mutex::new(None);

/// Signalled when a point is armed anew or disarmed.
static CHANGED: Condvar = Condvar::new();

static NEXT_ARMING: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Armed {
    arming: u64,
    action: FaultAction,
    skip: u64,
    hits: u64,
}

fn points() -> MutexGuard<'static, Option<HashMap<String, Armed>>> {
    POINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What happens at an armed point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// [`FaultPoint::check`] returns [`InjectedFault`].
    Fail,
    /// The process ends at once by SIGKILL: no destructor, no buffer flush.
    Crash,
    /// The thread sleeps, then goes on.
    Delay(Duration),
    /// The thread waits until the point is disarmed or armed anew, then goes on.
    Hold,
    /// As [`FaultAction::Hold`], the first pass that is not skipped; later ones are let through.
    HoldOnce,
}

/// The error of an armed point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fault injected at {point}")]
pub struct InjectedFault {
    /// Name of the point.
    pub point: &'static str,
}

impl From<InjectedFault> for std::io::Error {
    fn from(fault: InjectedFault) -> Self {
        Self::other(fault)
    }
}

/// A named spot in the code. Declare it as a static; names read `crate.operation.moment`.
#[derive(Debug)]
pub struct FaultPoint {
    name: &'static str,
}

impl FaultPoint {
    /// A point called `name`.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name }
    }

    /// Does what the point is armed for; nothing otherwise.
    ///
    /// Errors: [`InjectedFault`] when armed with [`FaultAction::Fail`].
    #[inline]
    pub fn check(&self) -> Result<(), InjectedFault> {
        // Relaxed: arming happens before the code under test is started; the registry's mutex
        // orders the rest.
        if ARMED.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.check_armed()
    }

    #[cold]
    fn check_armed(&self) -> Result<(), InjectedFault> {
        let (action, arming) = {
            let mut points = points();
            let Some(armed) = points.as_mut().and_then(|all| all.get_mut(self.name)) else {
                return Ok(());
            };
            armed.hits += 1;
            let once = armed.action == FaultAction::HoldOnce;
            if armed.hits <= armed.skip || (once && armed.hits > armed.skip + 1) {
                return Ok(());
            }
            (armed.action, armed.arming)
        };
        match action {
            FaultAction::Fail => Err(InjectedFault { point: self.name }),
            FaultAction::Delay(duration) => {
                std::thread::sleep(duration);
                Ok(())
            }
            FaultAction::Hold | FaultAction::HoldOnce => {
                let is_armed = |all: &HashMap<String, Armed>| {
                    all.get(self.name).is_some_and(|armed| armed.arming == arming)
                };
                let mut points = points();
                while points.as_ref().is_some_and(is_armed) {
                    points = CHANGED.wait(points).unwrap_or_else(PoisonError::into_inner);
                }
                Ok(())
            }
            FaultAction::Crash => die(),
        }
    }
}

/// Ends the process as `kill -9` does.
fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}

/// A point that stays armed until this is dropped.
#[derive(Debug)]
#[must_use = "the point is disarmed when this is dropped"]
pub struct ArmedFault {
    name: String,
    arming: u64,
}

impl ArmedFault {
    /// How often the point was passed since it was armed, skipped passes included.
    #[must_use]
    pub fn hits(&self) -> u64 {
        let points = points();
        let armed = points.as_ref().and_then(|all| all.get(&self.name));
        armed.filter(|armed| armed.arming == self.arming).map_or(0, |armed| armed.hits)
    }
}

impl Drop for ArmedFault {
    fn drop(&mut self) {
        let mut points = points();
        let Some(all) = points.as_mut() else { return };
        if all.get(&self.name).is_some_and(|armed| armed.arming == self.arming) {
            all.remove(&self.name);
            ARMED.fetch_sub(1, Ordering::Relaxed);
            CHANGED.notify_all();
        }
    }
}

/// Arms the point called `name`: the first `skip` passes are let through, every later one meets
/// `action`. Arming an armed point replaces what it does.
pub fn arm(name: &str, action: FaultAction, skip: u64) -> ArmedFault {
    ArmedFault { name: name.to_owned(), arming: arm_for_good(name, action, skip) }
}

/// Arms a point until it is armed again; the number of this arming.
fn arm_for_good(name: &str, action: FaultAction, skip: u64) -> u64 {
    let arming = NEXT_ARMING.fetch_add(1, Ordering::Relaxed);
    let mut points = points();
    let all = points.get_or_insert_with(HashMap::new);
    let armed = Armed { arming, action, skip, hits: 0 };
    if all.insert(name.to_owned(), armed).is_none() {
        ARMED.fetch_add(1, Ordering::Relaxed);
    }
    CHANGED.notify_all();
    arming
}

/// Arms what [`ENVIRONMENT_VARIABLE`] names, for the rest of the process. Returns how many.
///
/// Errors: the entry that was not understood; the ones before it are armed.
pub fn arm_from_environment() -> Result<usize, String> {
    match std::env::var(ENVIRONMENT_VARIABLE) {
        Ok(specification) => arm_from(&specification),
        Err(_) => Ok(0),
    }
}

fn arm_from(specification: &str) -> Result<usize, String> {
    let mut count = 0;
    for entry in specification.split(',').filter(|entry| !entry.is_empty()) {
        let (name, action, skip) = parse(entry).ok_or_else(|| entry.to_owned())?;
        arm_for_good(name, action, skip);
        count += 1;
    }
    Ok(count)
}

fn parse(entry: &str) -> Option<(&str, FaultAction, u64)> {
    let (name, rest) = entry.split_once('=')?;
    let (action, skip) = match rest.split_once('@') {
        Some((action, skip)) => (action, skip.parse().ok()?),
        None => (rest, 0),
    };
    let action = match action.split_once(':') {
        None if action == "fail" => FaultAction::Fail,
        None if action == "crash" => FaultAction::Crash,
        None if action == "hold" => FaultAction::Hold,
        Some(("delay", milliseconds)) => {
            FaultAction::Delay(Duration::from_millis(milliseconds.parse().ok()?))
        }
        _ => return None,
    };
    (!name.is_empty()).then_some((name, action, skip))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn an_armed_point_fails_after_the_skipped_passes_until_disarmed() {
        static POINT: FaultPoint = FaultPoint::new("env.test.skips");
        assert_eq!(POINT.check(), Ok(()));
        let armed = arm("env.test.skips", FaultAction::Fail, 2);
        assert_eq!(POINT.check(), Ok(()));
        assert_eq!(POINT.check(), Ok(()));
        assert_eq!(POINT.check(), Err(InjectedFault { point: "env.test.skips" }));
        assert_eq!(armed.hits(), 3);
        drop(armed);
        assert_eq!(POINT.check(), Ok(()));
    }

    #[test]
    fn arming_again_replaces_and_the_old_guard_no_longer_disarms() {
        static POINT: FaultPoint = FaultPoint::new("env.test.replaced");
        let old = arm("env.test.replaced", FaultAction::Fail, 1_000);
        let new = arm("env.test.replaced", FaultAction::Fail, 0);
        drop(old);
        assert!(POINT.check().is_err());
        drop(new);
        assert!(POINT.check().is_ok());
    }

    #[test]
    fn a_held_pass_goes_on_when_its_point_is_disarmed_or_armed_anew() {
        static POINT: FaultPoint = FaultPoint::new("env.test.holds");
        for again in [false, true] {
            let held = arm("env.test.holds", FaultAction::Hold, 0);
            let (sender, passed) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || sender.send(POINT.check()));
                while held.hits() == 0 {
                    std::thread::yield_now();
                }
                assert!(passed.try_recv().is_err(), "it waits");
                let once = again.then(|| arm("env.test.holds", FaultAction::HoldOnce, 0));
                drop(held);
                assert_eq!(passed.recv(), Ok(Ok(())));
                drop(once);
            });
        }
    }

    #[test]
    fn one_armed_point_leaves_the_others_alone() {
        static OTHER: FaultPoint = FaultPoint::new("env.test.other");
        let _armed = arm("env.test.not_other", FaultAction::Fail, 0);
        assert_eq!(OTHER.check(), Ok(()));
    }

    #[test]
    fn entries_of_the_environment_are_understood_or_named() {
        assert_eq!(parse("a.b=fail"), Some(("a.b", FaultAction::Fail, 0)));
        assert_eq!(parse("a=crash@17"), Some(("a", FaultAction::Crash, 17)));
        let delay = FaultAction::Delay(Duration::from_millis(5));
        assert_eq!(parse("a=delay:5@1"), Some(("a", delay, 1)));
        assert_eq!(arm_from("env.test.parsed=fail,what"), Err("what".to_owned()));
        for bad in ["", "=fail", "a", "a=", "a=explode", "a=fail@x", "a=delay", "a=delay:x"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "starts a process")]
    fn a_crash_point_kills_the_process_without_unwinding() {
        static POINT: FaultPoint = FaultPoint::new("env.test.crash");
        if std::env::var(ENVIRONMENT_VARIABLE).is_ok() {
            arm_from_environment().unwrap();
            let _ = POINT.check();
            return;
        }
        let test = "fault::tests::a_crash_point_kills_the_process_without_unwinding";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(ENVIRONMENT_VARIABLE, "env.test.crash=crash")
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9));
    }
}
