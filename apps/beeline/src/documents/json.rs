//! JSON as documents, and documents as JSON: MongoDB's relaxed extended form, as far as people type it.
//!
//! Invariant: fields keep the order in which they were typed, and in which they are stored; MongoDB's filters,
//! sorts and documents mean something else in another order. So JSON is read straight into documents and
//! written straight out of them: a `serde_json::Value` in between would sort the fields.

use std::fmt;

use bson::oid::ObjectId;
use bson::{Bson, Document};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, SerializeSeq as _, Serializer};

/// A value that a person typed.
///
/// Errors: no JSON; a name twice in one object; a wrapper such as `$oid` around what it cannot hold.
pub fn read(text: &str) -> Result<Bson, String> {
    let typed: Typed = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(typed.0)
}

/// A value as JSON.
#[must_use]
pub fn write(value: &Bson) -> String {
    // Strings and numbers always have a form, and a string takes all that is written to it.
    serde_json::to_string(&Shown(value)).unwrap_or_else(|error| format!("\"{error}\""))
}

struct Typed(Bson);

impl<'de> Deserialize<'de> for Typed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Bson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Bson, E> {
        Ok(Bson::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Bson, E> {
        Ok(Bson::Boolean(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Bson, E> {
        Ok(Bson::String(text.to_owned()))
    }

    fn visit_i64<E>(self, whole: i64) -> Result<Bson, E> {
        Ok(narrowest(whole))
    }

    fn visit_u64<E>(self, whole: u64) -> Result<Bson, E> {
        Ok(i64::try_from(whole).map_or(Bson::Double(whole as f64), narrowest))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Bson, E> {
        Ok(Bson::Double(number))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Bson, A::Error> {
        let mut all = Vec::new();
        while let Some(Typed(value)) = values.next_element()? {
            all.push(value);
        }
        Ok(Bson::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Bson, A::Error> {
        let mut document = Document::new();
        while let Some((name, Typed(value))) = fields.next_entry::<String, Typed>()? {
            if document.contains_key(&name) {
                return Err(A::Error::custom(format!("the field {name:?} stands twice")));
            }
            document.insert(name, value);
        }
        match wrapped(&document).map_err(A::Error::custom)? {
            Some(value) => Ok(value),
            None => Ok(Bson::Document(document)),
        }
    }
}

/// A whole number in the narrowest type.
fn narrowest(whole: i64) -> Bson {
    i32::try_from(whole).map_or(Bson::Int64(whole), Bson::Int32)
}

/// `{"$oid": ...}` and its kin.
fn wrapped(fields: &Document) -> Result<Option<Bson>, String> {
    let mut all = fields.iter();
    let (Some((name, value)), None) = (all.next(), all.next()) else { return Ok(None) };
    let wrong = || format!("{name} holds no {}", write(value));
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
            let time = match value {
                // Behind the year 9999 a date is written as milliseconds, which were read by now.
                Bson::Int64(millis) => Some(bson::DateTime::from_millis(*millis)),
                _ => text.and_then(|text| bson::DateTime::parse_rfc3339_str(text).ok()),
            };
            Bson::DateTime(time.ok_or_else(wrong)?)
        }
        _ => return Ok(None),
    }))
}

/// Milliseconds of the years 0 to 9999.
const FOUR_DIGITS: std::ops::RangeInclusive<i64> = -62_167_219_200_000..=253_402_300_799_999;

struct Shown<'b>(&'b Bson);

impl Serialize for Shown<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let one = |serializer: S, name: &str, text: &str| {
            let mut map = serializer.serialize_map(Some(1))?;
            map.serialize_entry(name, text)?;
            map.end()
        };
        match self.0 {
            Bson::Null => serializer.serialize_unit(),
            Bson::Boolean(value) => serializer.serialize_bool(*value),
            Bson::String(text) => serializer.serialize_str(text),
            Bson::Int32(number) => serializer.serialize_i32(*number),
            Bson::Int64(number) => serializer.serialize_i64(*number),
            Bson::Double(number) if number.is_finite() => serializer.serialize_f64(*number),
            Bson::Array(all) => {
                let mut array = serializer.serialize_seq(Some(all.len()))?;
                for value in all {
                    array.serialize_element(&Shown(value))?;
                }
                array.end()
            }
            Bson::Document(document) => {
                let mut map = serializer.serialize_map(Some(document.len()))?;
                for (name, value) in document {
                    map.serialize_entry(name, &Shown(value))?;
                }
                map.end()
            }
            Bson::ObjectId(id) => one(serializer, "$oid", &id.to_hex()),
            // Beyond the years of four digits the library's text is of another time.
            Bson::DateTime(time) => match time.try_to_rfc3339_string() {
                Ok(text) if FOUR_DIGITS.contains(&time.timestamp_millis()) => {
                    one(serializer, "$date", &text)
                }
                _ => {
                    let millis = bson::doc! { "$numberLong": time.timestamp_millis().to_string() };
                    let mut map = serializer.serialize_map(Some(1))?;
                    map.serialize_entry("$date", &Shown(&Bson::Document(millis)))?;
                    map.end()
                }
            },
            other => serializer.serialize_str(&other.to_string()),
        }
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
            r#"{"z":1,"a":{"y":[{"q":1,"b":2}],"c":3},"m":{"$gt":1,"$exists":true},"b":0}"#,
            r#"{"t":{"$date":{"$numberLong":"999999999999999"}}}"#,
            "17",
        ] {
            assert_eq!(write(&read(text).unwrap()), text);
        }
        assert_eq!(read(r#"{"$numberLong":"5"}"#), Ok(Bson::Int64(5)));
        assert_eq!(read("18446744073709551615"), Ok(Bson::Double(18_446_744_073_709_551_615.0)));
        assert!(read(r#"{"$oid":"short"}"#).unwrap_err().contains("$oid"));
        assert!(read(r#"{"a":1,"b":2,"a":3}"#).unwrap_err().contains("twice"));
        assert!(read("{").is_err());
    }

    #[test]
    fn fields_keep_the_order_they_were_typed_in() {
        let Ok(Bson::Document(document)) = read(r#"{"z":1,"b":{"y":1,"x":2},"a":2}"#) else {
            panic!("it is a document");
        };
        assert_eq!(document.keys().collect::<Vec<_>>(), ["z", "b", "a"]);
        let inner = document.get_document("b").unwrap();
        assert_eq!(inner.keys().collect::<Vec<_>>(), ["y", "x"]);
    }
}
