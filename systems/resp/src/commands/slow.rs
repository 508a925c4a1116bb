//! SLOWLOG and LATENCY: what took long.

use super::{Call, CommandResult};
use crate::error::CommandError;

pub fn slowlog_get(call: &mut Call<'_, '_>) -> CommandResult {
    let count = match call.args.len() {
        2 => 10,
        3 => call.integer(2)?,
        _ => return Err(CommandError::Syntax),
    };
    if count < -1 {
        return Err(CommandError::Line("ERR count should be greater than or equal to -1"));
    }
    let kept = call.figures.slow.newest(usize::try_from(count).unwrap_or(usize::MAX));
    call.out.array(kept.len());
    for slow in kept {
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        call.out.array(6);
        call.out.integer(number(slow.number));
        call.out.integer(number(slow.unix_s));
        call.out.integer(number(slow.microseconds));
        call.out.array(slow.arguments.len());
        slow.arguments.iter().for_each(|argument| call.out.bulk(argument));
        call.out.bulk(slow.client.0.as_bytes());
        call.out.bulk(&slow.client.1);
    }
    Ok(())
}

pub fn slowlog_len(call: &mut Call<'_, '_>) -> CommandResult {
    call.out.count(call.figures.slow.len());
    Ok(())
}

pub fn slowlog_reset(call: &mut Call<'_, '_>) -> CommandResult {
    call.figures.slow.clear();
    call.out.ok();
    Ok(())
}

pub fn slowlog_help(call: &mut Call<'_, '_>) -> CommandResult {
    super::introspection::help(
        call,
        "SLOWLOG",
        &[
            ("GET [<count>]", "Return the newest slow commands; -1: all of them."),
            ("LEN", "Return how many slow commands are kept."),
            ("RESET", "Forget them."),
        ],
    )
}

pub fn latency_histogram(call: &mut Call<'_, '_>) -> CommandResult {
    let start = call.out.len();
    let (args, out) = (call.args, &mut *call.out);
    // A container's name stands for its subcommands, too.
    let wanted = |name: &str| {
        let container = name.split('|').next().unwrap_or(name);
        let named = |word: &[u8]| {
            word.eq_ignore_ascii_case(name.as_bytes())
                || word.eq_ignore_ascii_case(container.as_bytes())
        };
        args.len() == 2 || args.from(2).any(named)
    };
    let mut shown = 0;
    if let Some(figures) = call.server.figures() {
        figures.histograms(&mut |name, calls, classes| {
            if !wanted(name) {
                return;
            }
            let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
            shown += 1;
            out.bulk(name.as_bytes());
            out.map(2);
            out.bulk(b"calls");
            out.integer(number(calls));
            out.bulk(b"histogram_usec");
            out.map(classes.len());
            for (longest, calls) in classes {
                out.integer(number(*longest));
                out.integer(number(*calls));
            }
        });
    }
    call.out.map_from(start, shown);
    Ok(())
}

pub fn latency_help(call: &mut Call<'_, '_>) -> CommandResult {
    super::introspection::help(
        call,
        "LATENCY",
        &[(
            "HISTOGRAM [<command> ...]",
            "Return how long commands took: a part of them, all while slowlog-log-slower-than is \
             not negative.",
        )],
    )
}
