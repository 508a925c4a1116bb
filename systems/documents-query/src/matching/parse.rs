//! From a filter document to [`Filter`].

use super::{
    BitTest, Bson, Code, DEEPEST, Document, Expression, Filter, Pattern, Predicate, Result, Schema,
    Sign, bad, fail, integral, number, path, truthy,
};

pub(super) fn filter(source: &Document, depth: usize) -> Result<Filter> {
    if depth > DEEPEST {
        return fail(Code::Overflow, "exceeded maximum query tree depth");
    }
    let mut parts = Vec::new();
    for (name, value) in source {
        match name.as_str() {
            "$and" => parts.push(Filter::And(list(name, value, depth)?)),
            "$or" => parts.push(Filter::Or(list(name, value, depth)?)),
            "$nor" => parts.push(Filter::Nor(list(name, value, depth)?)),
            "$expr" => parts.push(Filter::Expression(Box::new(Expression::parse(value)?))),
            "$jsonSchema" => match value {
                Bson::Document(schema) => {
                    parts.push(Filter::Schema(Box::new(Schema::parse(schema)?)));
                }
                _ => return fail(Code::TypeMismatch, "$jsonSchema must be an object"),
            },
            "$comment" => {}
            "$alwaysTrue" => parts.push(Filter::Constant(true)),
            "$alwaysFalse" => parts.push(Filter::Constant(false)),
            "$text" => {
                return fail(
                    Code::IndexNotFound,
                    "text index required for $text query; text search is not supported",
                );
            }
            "$where" => {
                return bad("$where is not supported: this server runs no JavaScript; use $expr");
            }
            other if other.starts_with('$') => {
                return bad(format!(
                    "unknown top level operator: {other}. If you have a field name that starts with a '$' symbol, consider using $getField or $setField."
                ));
            }
            field => parts.push(self::field(field, value, depth)?),
        }
    }
    Ok(match (parts.len(), parts.pop()) {
        (1, Some(only)) => only,
        (_, last) => {
            parts.extend(last);
            Filter::And(parts)
        }
    })
}

fn list(name: &str, value: &Bson, depth: usize) -> Result<Vec<Filter>> {
    let Bson::Array(elements) = value else { return bad(format!("{name} must be an array")) };
    if elements.is_empty() {
        return bad(format!("{name} must be a nonempty array"));
    }
    elements
        .iter()
        .map(|element| match element {
            Bson::Document(inner) => filter(inner, depth + 1),
            _ => bad(format!("{name} argument's entries must be objects")),
        })
        .collect()
}

/// Components of a field in a filter; empty ones are allowed there.
fn components(field: &str) -> Vec<String> {
    field.split('.').map(str::to_owned).collect()
}

fn field(field: &str, value: &Bson, depth: usize) -> Result<Filter> {
    let parts = components(field);
    if parts.len() > path::DEEPEST {
        return fail(Code::Overflow, "the path of a filter is too deep");
    }
    let predicate = match value {
        Bson::Document(operators) if is_operators(operators) => {
            let mut all = operators_of(operators, depth)?;
            match (all.len(), all.pop()) {
                (1, Some(only)) => only,
                (_, last) => {
                    all.extend(last);
                    // Each operator looks for its own element.
                    return Ok(Filter::And(
                        all.into_iter().map(|one| Filter::Field(parts.clone(), one)).collect(),
                    ));
                }
            }
        }
        other => equality(other)?,
    };
    Ok(Filter::Field(parts, predicate))
}

fn equality(value: &Bson) -> Result<Predicate> {
    Ok(match value {
        Bson::RegularExpression(regex) => {
            Predicate::Regex(Pattern::new(regex.pattern.as_str(), regex.options.as_str())?)
        }
        Bson::Undefined => return bad("cannot compare to undefined"),
        other => Predicate::Eq(other.clone()),
    })
}

fn is_operators(document: &Document) -> bool {
    document.keys().next().is_some_and(|first| {
        first.starts_with('$') && !matches!(first.as_str(), "$ref" | "$id" | "$db")
    })
}

pub(super) fn operators_of(operators: &Document, depth: usize) -> Result<Vec<Predicate>> {
    let mut all = Vec::new();
    for (name, value) in operators {
        let predicate = match name.as_str() {
            "$eq" => Predicate::Eq(value.clone()),
            "$ne" => {
                if matches!(value, Bson::RegularExpression(_)) {
                    return bad("Can't have regex as arg to $ne.");
                }
                Predicate::Not(Box::new(Predicate::Eq(value.clone())))
            }
            "$gt" => compare(Sign::Gt, value)?,
            "$gte" => compare(Sign::Gte, value)?,
            "$lt" => compare(Sign::Lt, value)?,
            "$lte" => compare(Sign::Lte, value)?,
            "$in" => membership(name, value)?,
            "$nin" => Predicate::Not(Box::new(membership(name, value)?)),
            "$exists" => {
                if truthy(value) {
                    Predicate::Exists
                } else {
                    Predicate::Not(Box::new(Predicate::Exists))
                }
            }
            "$type" => {
                let (codes, numbers) = type_codes(value)?;
                Predicate::Type(codes, numbers)
            }
            "$mod" => modulo(value)?,
            "$regex" => regex(value, operators.get("$options"))?,
            "$options" if operators.contains_key("$regex") => continue,
            "$options" => return bad("$options needs a $regex"),
            "$size" => match integral(value) {
                Some(size) if size >= 0 => Predicate::Size(size),
                Some(_) => {
                    return fail(
                        Code::BadValue,
                        "Failed to parse $size. Expected a non-negative number",
                    );
                }
                None => return fail(Code::BadValue, "Failed to parse $size. Expected an integer"),
            },
            "$not" => match value {
                Bson::RegularExpression(_) => Predicate::Not(Box::new(equality(value)?)),
                Bson::Document(inner) if is_operators(inner) => {
                    Predicate::Not(Box::new(Predicate::All(operators_of(inner, depth + 1)?)))
                }
                _ => return bad("$not needs a regex or a document"),
            },
            "$all" => all_of(value, depth)?,
            "$elemMatch" => element_match(value, depth)?,
            "$bitsAllSet" => Predicate::Bits(BitTest::AllSet, positions(name, value)?),
            "$bitsAllClear" => Predicate::Bits(BitTest::AllClear, positions(name, value)?),
            "$bitsAnySet" => Predicate::Bits(BitTest::AnySet, positions(name, value)?),
            "$bitsAnyClear" => Predicate::Bits(BitTest::AnyClear, positions(name, value)?),
            "$comment" => continue,
            "$near" | "$nearSphere" | "$geoWithin" | "$geoIntersects" => {
                return bad(format!(
                    "{name} is not supported: this server has no geospatial queries"
                ));
            }
            other => return bad(format!("unknown operator: {other}")),
        };
        all.push(predicate);
    }
    Ok(all)
}

fn compare(sign: Sign, value: &Bson) -> Result<Predicate> {
    if matches!(value, Bson::RegularExpression(_)) {
        return bad("Can't have RegEx as arg to predicate over field");
    }
    Ok(Predicate::Compare(sign, value.clone()))
}

fn membership(name: &str, value: &Bson) -> Result<Predicate> {
    let Bson::Array(elements) = value else { return bad(format!("{name} needs an array")) };
    let (mut values, mut patterns) = (Vec::new(), Vec::new());
    for element in elements {
        match element {
            Bson::RegularExpression(regex) => {
                patterns.push(Pattern::new(regex.pattern.as_str(), regex.options.as_str())?);
            }
            Bson::Document(inner) if is_operators(inner) => {
                return bad(format!("cannot nest $ under {name}"));
            }
            other => values.push(other.clone()),
        }
    }
    // In order, so that a value is found among many without looking at each.
    values.sort_by(crate::value::compare);
    Ok(Predicate::In(values, patterns))
}

/// The type numbers of `$type`, and whether all numbers count.
///
/// Errors: an unknown name or number.
pub fn type_codes(value: &Bson) -> Result<(Vec<i32>, bool)> {
    let one = |value: &Bson| -> Result<Option<i32>> {
        if let Bson::String(name) = value {
            return match type_of_name(name) {
                Some(code) => Ok(Some(code)),
                None if name == "number" => Ok(None),
                None => bad(format!("Unknown type name alias: {name}")),
            };
        }
        match integral(value) {
            Some(code @ (-1 | 1..=19 | 127)) => Ok(Some(code as i32)),
            Some(255) => Ok(Some(-1)),
            Some(other) => bad(format!("Invalid numerical type code: {other}")),
            None => fail(Code::TypeMismatch, "type must be represented as a number or a string"),
        }
    };
    let (mut codes, mut numbers) = (Vec::new(), false);
    let values = match value {
        Bson::Array(values) if values.is_empty() => {
            return fail(Code::FailedToParse, "$type must match at least one type");
        }
        Bson::Array(values) => values.as_slice(),
        single => std::slice::from_ref(single),
    };
    for value in values {
        match one(value)? {
            Some(code) => codes.push(code),
            None => numbers = true,
        }
    }
    Ok((codes, numbers))
}

fn type_of_name(name: &str) -> Option<i32> {
    Some(match name {
        "double" => 1,
        "string" => 2,
        "object" => 3,
        "array" => 4,
        "binData" => 5,
        "undefined" => 6,
        "objectId" => 7,
        "bool" => 8,
        "date" => 9,
        "null" => 10,
        "regex" => 11,
        "dbPointer" => 12,
        "javascript" => 13,
        "symbol" => 14,
        "javascriptWithScope" => 15,
        "int" => 16,
        "timestamp" => 17,
        "long" => 18,
        "decimal" => 19,
        "minKey" => -1,
        "maxKey" => 127,
        _ => return None,
    })
}

fn modulo(value: &Bson) -> Result<Predicate> {
    let Bson::Array(parts) = value else { return bad("malformed mod, needs to be an array") };
    match parts.as_slice() {
        [] | [_] => bad("malformed mod, not enough elements"),
        [divisor, remainder] => {
            let truncate = |value: &Bson| {
                number(value).filter(|value| value.is_finite()).map(|value| value.trunc() as i64)
            };
            let divisor = super::integral(divisor).or_else(|| truncate(divisor));
            let remainder = super::integral(remainder).or_else(|| truncate(remainder));
            match (divisor, remainder) {
                (Some(0), _) => bad("divisor cannot be 0"),
                (Some(divisor), Some(remainder)) => Ok(Predicate::Mod(divisor, remainder)),
                _ => bad("malformed mod, divisor and remainder must be numbers"),
            }
        }
        _ => bad("malformed mod, too many elements"),
    }
}

fn regex(value: &Bson, options: Option<&Bson>) -> Result<Predicate> {
    let given = match options {
        Some(Bson::String(options)) => Some(options.as_str()),
        Some(_) => return bad("$options has to be a string"),
        None => None,
    };
    match value {
        Bson::String(pattern) => Ok(Predicate::Regex(Pattern::new(pattern, given.unwrap_or(""))?)),
        Bson::RegularExpression(regex) => {
            let options = given.unwrap_or(regex.options.as_str());
            Ok(Predicate::Regex(Pattern::new(regex.pattern.as_str(), options)?))
        }
        _ => bad("$regex has to be a string"),
    }
}

fn all_of(value: &Bson, depth: usize) -> Result<Predicate> {
    let Bson::Array(elements) = value else { return bad("$all needs an array") };
    if elements.is_empty() {
        return Ok(Predicate::In(Vec::new(), Vec::new()));
    }
    let mut parts = Vec::new();
    for element in elements {
        parts.push(match element {
            Bson::Document(inner) if inner.keys().next().is_some_and(|k| k == "$elemMatch") => {
                match inner.get("$elemMatch") {
                    Some(value) => element_match(value, depth)?,
                    None => continue,
                }
            }
            Bson::Document(inner) if is_operators(inner) => return bad("no $ expressions in $all"),
            other => equality(other)?,
        });
    }
    Ok(Predicate::All(parts))
}

fn element_match(value: &Bson, depth: usize) -> Result<Predicate> {
    let Bson::Document(inner) = value else { return bad("$elemMatch needs an Object") };
    let logical = inner.keys().next().is_some_and(|first| {
        matches!(first.as_str(), "$and" | "$or" | "$nor" | "$expr" | "$jsonSchema")
    });
    if is_operators(inner) && !logical {
        return Ok(Predicate::ElementValue(operators_of(inner, depth + 1)?));
    }
    Ok(Predicate::ElementMatch(Box::new(filter(inner, depth + 1)?)))
}

fn positions(name: &str, value: &Bson) -> Result<Vec<u8>> {
    let of_bytes = |bytes: &[u8]| -> Vec<u8> {
        (0..bytes.len().min(31) * 8)
            .filter(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1)
            .map(|bit| bit as u8)
            .collect()
    };
    match value {
        Bson::Array(elements) => elements
            .iter()
            .map(|element| match integral(element) {
                Some(bit @ 0..=255) => Ok(bit as u8),
                Some(bit) if bit > 255 => Ok(255),
                _ => bad(format!(
                    "Failed to parse bit position. Expected a non-negative number in {name}"
                )),
            })
            .collect(),
        Bson::Binary(binary) => Ok(of_bytes(&binary.bytes)),
        other => match integral(other) {
            Some(mask) if mask >= 0 => Ok(of_bytes(&mask.to_le_bytes())),
            _ => bad(format!("{name} takes an Array, a number, or a BinData")),
        },
    }
}
