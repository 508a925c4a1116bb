//! JSON as documents, and documents as JSON: MongoDB's relaxed extended form, as far as people type it.
//!
//! Fields come in the order of their names: the parser does not keep the order they were typed in.

use bson::oid::ObjectId;
use bson::{Bson, Document};
use serde_json::{Map, Value, json};

/// A value that a person typed.
///
/// Errors: no JSON; a wrapper such as `$oid` around what it cannot hold.
pub fn read(text: &str) -> Result<Bson, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    of(value)
}

fn of(value: Value) -> Result<Bson, String> {
    Ok(match value {
        Value::Null => Bson::Null,
        Value::Bool(value) => Bson::Boolean(value),
        Value::String(text) => Bson::String(text),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => i32::try_from(whole).map_or(Bson::Int64(whole), Bson::Int32),
            None => Bson::Double(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Array(all) => Bson::Array(all.into_iter().map(of).collect::<Result<_, _>>()?),
        Value::Object(fields) => wrapped(&fields)?.map_or_else(
            || {
                let mut document = Document::new();
                for (name, value) in fields {
                    document.insert(name, of(value)?);
                }
                Ok::<_, String>(Bson::Document(document))
            },
            Ok,
        )?,
    })
}

/// `{"$oid": ...}` and its kin.
fn wrapped(fields: &Map<String, Value>) -> Result<Option<Bson>, String> {
    let mut all = fields.iter();
    let (Some((name, value)), None) = (all.next(), all.next()) else { return Ok(None) };
    let wrong = || format!("{name} holds no {value}");
    let text = value.as_str();
    Ok(Some(match name.as_str() {
        "$oid" => {
            let id = text.and_then(|text| ObjectId::parse_str(text).ok()).ok_or_else(wrong)?;
            Bson::ObjectId(id)
        }
        "$numberLong" => {
            let number = text.and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
            Bson::Int64(number)
        }
        "$date" => {
            let time = text.and_then(|text| bson::DateTime::parse_rfc3339_str(text).ok());
            Bson::DateTime(time.ok_or_else(wrong)?)
        }
        _ => return Ok(None),
    }))
}

/// A value as JSON.
#[must_use]
pub fn write(value: &Bson) -> Value {
    match value {
        Bson::Null => Value::Null,
        Bson::Boolean(value) => json!(value),
        Bson::String(text) => json!(text),
        Bson::Int32(number) => json!(number),
        Bson::Int64(number) => json!(number),
        Bson::Double(number) if number.is_finite() => json!(number),
        Bson::Array(all) => Value::Array(all.iter().map(write).collect()),
        Bson::Document(document) => Value::Object(
            document.iter().map(|(name, value)| (name.clone(), write(value))).collect(),
        ),
        Bson::ObjectId(id) => json!({ "$oid": id.to_hex() }),
        Bson::DateTime(time) => match time.try_to_rfc3339_string() {
            Ok(text) => json!({ "$date": text }),
            Err(_) => json!({ "$date": { "$numberLong": time.timestamp_millis().to_string() } }),
        },
        other => json!(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_types_comes_back_as_typed() {
        for text in [
            r#"{"_id":{"$oid":"0102030405060708090a0b0c"},"a":[1,2.5,null,true,"x"]}"#,
            r#"{"n":{"m":5000000000},"t":{"$date":"2026-01-02T03:04:05Z"}}"#,
            "17",
        ] {
            assert_eq!(write(&read(text).unwrap()).to_string(), text);
        }
        assert_eq!(read(r#"{"$numberLong":"5"}"#), Ok(Bson::Int64(5)));
        assert!(read(r#"{"$oid":"short"}"#).unwrap_err().contains("$oid"));
        assert!(read("{").is_err());
    }
}
