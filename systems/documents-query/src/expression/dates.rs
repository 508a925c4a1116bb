//! Dates: parts, formats, arithmetic in a time zone.

use bson::{Bson, DateTime, Document};
use jiff::civil::{self, Weekday};
use jiff::tz::{Offset, TimeZone};
use jiff::{Span, Timestamp, Zoned};

use super::{MISSING, Op, is_nullish};
use crate::error::{Code, Result, bad, fail};
use crate::value::{integral, truthy, type_name};

pub(super) fn apply(op: Op, values: &[Bson]) -> Option<Result<Bson>> {
    Some(match op {
        Op::Year
        | Op::Month
        | Op::DayOfMonth
        | Op::DayOfWeek
        | Op::DayOfYear
        | Op::Hour
        | Op::Minute
        | Op::Second
        | Op::Millisecond
        | Op::Week
        | Op::IsoWeek
        | Op::IsoWeekYear
        | Op::IsoDayOfWeek => part(op, values),
        Op::DateToString => to_string(values),
        Op::DateFromString => from_string(values),
        Op::DateToParts => to_parts(values),
        Op::DateFromParts => from_parts(values),
        Op::DateAdd => shift(values, 1),
        Op::DateSubtract => shift(values, -1),
        Op::DateDiff => difference(values),
        Op::DateTrunc => truncate(values),
        _ => return None,
    })
}

fn overflow<T>(_: impl std::fmt::Display) -> Result<T> {
    fail(Code::Overflow, "the date is out of range")
}

fn date_of(op: Op, value: &Bson) -> Result<Option<DateTime>> {
    match value {
        Bson::DateTime(date) => Ok(Some(*date)),
        Bson::ObjectId(id) => Ok(Some(id.timestamp())),
        Bson::Timestamp(stamp) => Ok(Some(DateTime::from_millis(i64::from(stamp.time) * 1000))),
        value if is_nullish(value) => Ok(None),
        other => fail(
            Code::SliceShape,
            format!("{}: can't convert from BSON type {} to Date", op.name(), type_name(other)),
        ),
    }
}

/// The zone of a name, an offset (`+05:30`, `-0300`, `+04`) or nothing.
fn zone(value: Option<&Bson>) -> Result<Option<TimeZone>> {
    let name = match value {
        None | Some(Bson::Undefined) => return Ok(Some(TimeZone::UTC)),
        Some(Bson::Null) => return Ok(None),
        Some(Bson::String(name)) => name,
        Some(other) => {
            return bad(format!("timezone must evaluate to a string, found {}", type_name(other)));
        }
    };
    if let Some(sign) = name.chars().next().filter(|first| matches!(first, '+' | '-')) {
        let digits: String = name[1..].chars().filter(|letter| *letter != ':').collect();
        let (hours, minutes) = digits.split_at_checked(2).unwrap_or((&digits, ""));
        if let (Ok(hours), Ok(minutes)) =
            (hours.parse::<i32>(), if minutes.is_empty() { Ok(0) } else { minutes.parse::<i32>() })
        {
            let seconds = (hours * 60 + minutes) * 60;
            let seconds = if sign == '-' { -seconds } else { seconds };
            if let Ok(offset) = Offset::from_seconds(seconds) {
                return Ok(Some(TimeZone::fixed(offset)));
            }
        }
        return bad(format!("unrecognized time zone identifier: \"{name}\""));
    }
    if matches!(name.as_str(), "UTC" | "GMT" | "Z" | "Etc/UTC") {
        return Ok(Some(TimeZone::UTC));
    }
    TimeZone::get(name)
        .map(Some)
        .or_else(|_| bad(format!("unrecognized time zone identifier: \"{name}\"")))
}

fn zoned(date: DateTime, zone: TimeZone) -> Result<Zoned> {
    Timestamp::from_millisecond(date.timestamp_millis())
        .map(|stamp| stamp.to_zoned(zone))
        .or_else(overflow)
}

fn back(zoned: &Zoned) -> DateTime {
    DateTime::from_millis(zoned.timestamp().as_millisecond())
}

/// A date as ISO 8601 in UTC, with milliseconds.
pub(super) fn iso(date: DateTime) -> String {
    match zoned(date, TimeZone::UTC) {
        Ok(zoned) => format(&zoned, "%Y-%m-%dT%H:%M:%S.%LZ").unwrap_or_default(),
        Err(_) => date.to_string(),
    }
}

fn week_of_year(zoned: &Zoned) -> i16 {
    // Weeks start on Sunday; days before the first Sunday are week 0.
    let sunday_first = zoned.weekday().to_sunday_zero_offset();
    (zoned.day_of_year() - i16::from(sunday_first) + 6) / 7
}

fn part(op: Op, values: &[Bson]) -> Result<Bson> {
    let (Some(date), Some(zone)) = (date_of(op, &values[0])?, zone(values.get(1))?) else {
        return Ok(Bson::Null);
    };
    let at = zoned(date, zone)?;
    Ok(match op {
        Op::IsoWeekYear => return Ok(Bson::Int64(i64::from(at.date().iso_week_date().year()))),
        Op::Year => Bson::Int32(i32::from(at.year())),
        Op::Month => Bson::Int32(i32::from(at.month())),
        Op::DayOfMonth => Bson::Int32(i32::from(at.day())),
        Op::DayOfWeek => Bson::Int32(i32::from(at.weekday().to_sunday_one_offset())),
        Op::DayOfYear => Bson::Int32(i32::from(at.day_of_year())),
        Op::Hour => Bson::Int32(i32::from(at.hour())),
        Op::Minute => Bson::Int32(i32::from(at.minute())),
        Op::Second => Bson::Int32(i32::from(at.second())),
        Op::Millisecond => Bson::Int32(i32::from(at.millisecond())),
        Op::Week => Bson::Int32(i32::from(week_of_year(&at))),
        Op::IsoWeek => Bson::Int32(i32::from(at.date().iso_week_date().week())),
        _ => Bson::Int32(i32::from(at.weekday().to_monday_one_offset())),
    })
}

fn format(at: &Zoned, pattern: &str) -> Result<String> {
    use std::fmt::Write as _;
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let mut out = String::new();
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let offset = at.offset().seconds();
        let sign = if offset < 0 { '-' } else { '+' };
        let minutes = offset.abs() / 60;
        let month = MONTHS[usize::from(at.month().unsigned_abs()).clamp(1, 12) - 1];
        let written = match letters.next() {
            Some('Y') => write!(out, "{:04}", at.year()),
            Some('m') => write!(out, "{:02}", at.month()),
            Some('d') => write!(out, "{:02}", at.day()),
            Some('H') => write!(out, "{:02}", at.hour()),
            Some('M') => write!(out, "{:02}", at.minute()),
            Some('S') => write!(out, "{:02}", at.second()),
            Some('L') => write!(out, "{:03}", at.millisecond()),
            Some('j') => write!(out, "{:03}", at.day_of_year()),
            Some('w') => write!(out, "{}", at.weekday().to_sunday_one_offset()),
            Some('u') => write!(out, "{}", at.weekday().to_monday_one_offset()),
            Some('U') => write!(out, "{:02}", week_of_year(at)),
            Some('V') => write!(out, "{:02}", at.date().iso_week_date().week()),
            Some('G') => write!(out, "{:04}", at.date().iso_week_date().year()),
            Some('b') => write!(out, "{}", &month[..3]),
            Some('B') => write!(out, "{month}"),
            Some('z') => write!(out, "{sign}{:02}{:02}", minutes / 60, minutes % 60),
            Some('Z') => write!(out, "{}{minutes}", if sign == '-' { "-" } else { "+" }),
            Some('%') => write!(out, "%"),
            Some(other) => {
                return bad(format!("Invalid format character '%{other}' in format string"));
            }
            None => return bad("Unmatched '%' at end of format string"),
        };
        let _ = written;
    }
    Ok(out)
}

fn to_string(values: &[Bson]) -> Result<Bson> {
    let [date, pattern, zone_name, on_null] = values else { return Ok(MISSING) };
    let Some(date) = date_of(Op::DateToString, date)? else {
        return Ok(if *on_null == MISSING { Bson::Null } else { on_null.clone() });
    };
    let Some(tz) = zone(Some(zone_name))? else { return Ok(Bson::Null) };
    let default =
        if tz == TimeZone::UTC { "%Y-%m-%dT%H:%M:%S.%LZ" } else { "%Y-%m-%dT%H:%M:%S.%L" };
    let pattern = match pattern {
        Bson::String(pattern) => pattern.as_str(),
        Bson::Undefined => default,
        Bson::Null => return Ok(Bson::Null),
        other => {
            return bad(format!(
                "$dateToString requires that 'format' be a string, found: {}",
                type_name(other)
            ));
        }
    };
    format(&zoned(date, tz)?, pattern).map(Bson::String)
}

fn from_string(values: &[Bson]) -> Result<Bson> {
    let [text, pattern, zone_name, on_error, on_null] = values else { return Ok(MISSING) };
    let or = |value: &Bson| if *value == MISSING { Bson::Null } else { value.clone() };
    let text = match text {
        Bson::String(text) => text,
        value if is_nullish(value) => return Ok(or(on_null)),
        _ if *on_error != MISSING => return Ok(on_error.clone()),
        other => {
            return fail(
                Code::ConversionFailure,
                format!(
                    "$dateFromString requires that 'dateString' be a string, found: {}",
                    type_name(other)
                ),
            );
        }
    };
    let pattern = match pattern {
        Bson::String(pattern) => Some(pattern.as_str()),
        _ => None,
    };
    let Some(tz) = zone(Some(zone_name))? else { return Ok(Bson::Null) };
    match parse(text, pattern, Some(tz)) {
        Err(_) if *on_error != MISSING => Ok(on_error.clone()),
        result => result.map(Bson::DateTime),
    }
}

/// Reads a date: ISO 8601 with a space or a `T`, a date alone, or a pattern.
pub(super) fn parse(text: &str, pattern: Option<&str>, zone: Option<TimeZone>) -> Result<DateTime> {
    let unread =
        || fail(Code::ConversionFailure, format!("Error parsing date string '{text:.60}'"));
    let zone = zone.unwrap_or(TimeZone::UTC);
    if let Some(pattern) = pattern {
        let pattern = pattern.replace("%L", "%3f");
        let Ok(broken) = jiff::fmt::strtime::parse(&pattern, text) else { return unread() };
        if let Ok(stamp) = broken.to_timestamp() {
            return Ok(DateTime::from_millis(stamp.as_millisecond()));
        }
        let civil =
            broken.to_datetime().or_else(|_| broken.to_date().map(|date| date.at(0, 0, 0, 0)));
        return match civil.and_then(|civil| civil.to_zoned(zone)) {
            Ok(zoned) => Ok(back(&zoned)),
            Err(_) => unread(),
        };
    }
    let text = text.trim();
    if let Ok(stamp) = text.parse::<Timestamp>() {
        return Ok(DateTime::from_millis(stamp.as_millisecond()));
    }
    let civil = text
        .parse::<civil::DateTime>()
        .or_else(|_| text.parse::<civil::Date>().map(|date| date.at(0, 0, 0, 0)));
    match civil.and_then(|civil| civil.to_zoned(zone)) {
        Ok(zoned) => Ok(back(&zoned)),
        Err(_) => unread(),
    }
}

fn to_parts(values: &[Bson]) -> Result<Bson> {
    let (Some(date), Some(zone)) = (date_of(Op::DateToParts, &values[0])?, zone(values.get(1))?)
    else {
        return Ok(Bson::Null);
    };
    let at = zoned(date, zone)?;
    let mut parts = Document::new();
    if truthy(&values[2]) {
        let week = at.date().iso_week_date();
        parts.insert("isoWeekYear", i32::from(week.year()));
        parts.insert("isoWeek", i32::from(week.week()));
        parts.insert("isoDayOfWeek", i32::from(at.weekday().to_monday_one_offset()));
    } else {
        parts.insert("year", i32::from(at.year()));
        parts.insert("month", i32::from(at.month()));
        parts.insert("day", i32::from(at.day()));
    }
    parts.insert("hour", i32::from(at.hour()));
    parts.insert("minute", i32::from(at.minute()));
    parts.insert("second", i32::from(at.second()));
    parts.insert("millisecond", i32::from(at.millisecond()));
    Ok(Bson::Document(parts))
}

fn from_parts(values: &[Bson]) -> Result<Bson> {
    let Some(zone) = zone(values.get(7))? else { return Ok(Bson::Null) };
    let mut numbers = [0_i64; 11];
    for (at, value) in values.iter().enumerate() {
        if at == 7 {
            continue;
        }
        let default = i64::from(matches!(at, 1 | 2 | 9 | 10));
        numbers[at] = match value {
            Bson::Undefined => default,
            Bson::Null => return Ok(Bson::Null),
            value => match integral(value) {
                Some(part @ -32_768..=32_767_000) => part,
                _ => return bad("$dateFromParts: the parts must evaluate to integers in range"),
            },
        };
    }
    let base = if values[8] == MISSING {
        let Ok(first) = civil::Date::new(numbers[0].clamp(-9999, 9999) as i16, 1, 1) else {
            return overflow("");
        };
        first.checked_add(Span::new().months(numbers[1] - 1).days(numbers[2] - 1))
    } else {
        // The Monday of ISO week 1 holds January 4th.
        let Ok(fourth) = civil::Date::new(numbers[8].clamp(-9999, 9999) as i16, 1, 4) else {
            return overflow("");
        };
        let monday = i64::from(fourth.weekday().to_monday_zero_offset());
        fourth.checked_add(Span::new().days((numbers[9] - 1) * 7 + numbers[10] - 1 - monday))
    };
    let moment = base.map(|date| date.at(0, 0, 0, 0)).and_then(|midnight| {
        midnight.checked_add(
            Span::new()
                .hours(numbers[3])
                .minutes(numbers[4])
                .seconds(numbers[5])
                .milliseconds(numbers[6]),
        )
    });
    match moment.and_then(|moment| moment.to_zoned(zone)) {
        Ok(zoned) => Ok(Bson::DateTime(back(&zoned))),
        Err(error) => overflow(error),
    }
}

fn unit(value: &Bson) -> Result<&str> {
    match value {
        Bson::String(name)
            if matches!(
                name.as_str(),
                "year"
                    | "quarter"
                    | "month"
                    | "week"
                    | "day"
                    | "hour"
                    | "minute"
                    | "second"
                    | "millisecond"
            ) =>
        {
            Ok(name)
        }
        other => fail(Code::FailedToParse, format!("unknown time unit value: {other}")),
    }
}

fn span(unit: &str, amount: i64) -> Result<Span> {
    let empty = Span::new();
    let made = match unit {
        "year" => empty.try_years(amount),
        "quarter" => empty.try_months(amount.saturating_mul(3)),
        "month" => empty.try_months(amount),
        "week" => empty.try_weeks(amount),
        "day" => empty.try_days(amount),
        "hour" => empty.try_hours(amount),
        "minute" => empty.try_minutes(amount),
        "second" => empty.try_seconds(amount),
        _ => empty.try_milliseconds(amount),
    };
    made.or_else(overflow)
}

fn shift(values: &[Bson], sign: i64) -> Result<Bson> {
    let [date, unit_name, amount, zone_name] = values else { return Ok(MISSING) };
    let (Some(date), Some(zone)) = (date_of(Op::DateAdd, date)?, zone(Some(zone_name))?) else {
        return Ok(Bson::Null);
    };
    if is_nullish(unit_name) || is_nullish(amount) {
        return Ok(Bson::Null);
    }
    let Some(amount) = integral(amount) else {
        return bad("$dateAdd expects integer amount of time units");
    };
    match zoned(date, zone)?.checked_add(span(unit(unit_name)?, amount.saturating_mul(sign))?) {
        Ok(at) => Ok(Bson::DateTime(back(&at))),
        Err(error) => overflow(error),
    }
}

fn first_day(value: Option<&Bson>) -> Result<Weekday> {
    let name = match value {
        Some(Bson::String(name)) => name.to_ascii_lowercase(),
        _ => return Ok(Weekday::Sunday),
    };
    Ok(match name.get(..3) {
        Some("mon") => Weekday::Monday,
        Some("tue") => Weekday::Tuesday,
        Some("wed") => Weekday::Wednesday,
        Some("thu") => Weekday::Thursday,
        Some("fri") => Weekday::Friday,
        Some("sat") => Weekday::Saturday,
        Some("sun") => Weekday::Sunday,
        _ => return fail(Code::FailedToParse, format!("unknown day of week value: {name}")),
    })
}

/// How many whole units a date lies after a fixed one.
fn ordinal(at: &Zoned, unit: &str, week_start: Weekday) -> i64 {
    let months = i64::from(at.year()) * 12 + i64::from(at.month()) - 1;
    let days = days_since_epoch(at.date());
    let local_seconds = days * 86_400
        + i64::from(at.hour()) * 3600
        + i64::from(at.minute()) * 60
        + i64::from(at.second());
    match unit {
        "year" => i64::from(at.year()),
        "quarter" => months.div_euclid(3),
        "month" => months,
        // The first day of 1970 was a Thursday.
        "week" => (days + 3 - i64::from(week_start.to_monday_zero_offset())).div_euclid(7),
        "day" => days,
        "hour" => local_seconds.div_euclid(3600),
        "minute" => local_seconds.div_euclid(60),
        "second" => local_seconds,
        _ => at.timestamp().as_millisecond(),
    }
}

fn days_since_epoch(date: civil::Date) -> i64 {
    civil::date(1970, 1, 1).until(date).map_or(0, |span| i64::from(span.get_days()))
}

fn difference(values: &[Bson]) -> Result<Bson> {
    let [start, end, unit_name, zone_name, week] = values else { return Ok(MISSING) };
    let (Some(start), Some(end), Some(zone)) =
        (date_of(Op::DateDiff, start)?, date_of(Op::DateDiff, end)?, zone(Some(zone_name))?)
    else {
        return Ok(Bson::Null);
    };
    let (unit, week) = (unit(unit_name)?, first_day(Some(week))?);
    let (start, end) = (zoned(start, zone.clone())?, zoned(end, zone)?);
    Ok(Bson::Int64(ordinal(&end, unit, week) - ordinal(&start, unit, week)))
}

fn truncate(values: &[Bson]) -> Result<Bson> {
    let [date, unit_name, size, zone_name, week] = values else { return Ok(MISSING) };
    let (Some(date), Some(zone)) = (date_of(Op::DateTrunc, date)?, zone(Some(zone_name))?) else {
        return Ok(Bson::Null);
    };
    let size = match size {
        Bson::Undefined => 1,
        Bson::Null => return Ok(Bson::Null),
        value => match integral(value) {
            Some(size @ 1..=1_000_000_000) => size,
            _ => return bad("$dateTrunc requires 'binSize' to be greater than 0"),
        },
    };
    let (unit, week) = (unit(unit_name)?, first_day(Some(week))?);
    let at = zoned(date, zone.clone())?;
    // Bins are counted from the first day of 2000.
    let Ok(origin) = civil::date(2000, 1, 1).to_zoned(zone.clone()) else { return overflow("") };
    let first = ordinal(&origin, unit, week);
    let bin = (ordinal(&at, unit, week) - first).div_euclid(size) * size;
    let base = match unit {
        "week" => {
            let back = (i64::from(origin.weekday().to_monday_zero_offset())
                - i64::from(week.to_monday_zero_offset()))
            .rem_euclid(7);
            origin.checked_sub(Span::new().days(back)).or_else(overflow)?
        }
        _ => origin,
    };
    let moved =
        base.datetime().checked_add(span(unit, bin)?).and_then(|civil| civil.to_zoned(zone));
    match moved {
        Ok(moved) => Ok(Bson::DateTime(back(&moved))),
        Err(error) => overflow(error),
    }
}
