//! Aggregation expressions: parsed once, evaluated on a document.
//!
//! A missing value is [`MISSING`] (BSON's undefined), which no stored field holds.

use bson::{Bson, DateTime, Document};

use crate::error::{Code, Result, fail};
use crate::memory::{Lease, Memory, bounded, size_of_value};
use crate::path;
use crate::value::truthy;

mod arithmetic;
mod arrays;
mod convert;
mod dates;
mod parse;
mod strings;

pub use arrays::{deviation, sliced};
pub use convert::to_text;

/// What an expression yields where there is nothing.
pub const MISSING: Bson = Bson::Undefined;

/// Deepest nesting of an expression.
const DEEPEST: usize = 100;

/// True for null and missing.
#[must_use]
pub fn is_nullish(value: &Bson) -> bool {
    matches!(value, Bson::Null | Bson::Undefined)
}

/// Variables and those around them.
#[derive(Clone, Copy, Debug)]
struct Frame<'a> {
    held: Held<'a>,
    outer: Option<&'a Frame<'a>>,
}

/// The variables of a frame: one, or all of a `$let`.
#[derive(Clone, Copy, Debug)]
enum Held<'a> {
    One(&'a str, &'a Bson),
    All(&'a [(&'a str, Bson)]),
}

impl<'a> Held<'a> {
    fn get(self, wanted: &str) -> Option<&'a Bson> {
        match self {
            Self::One(name, value) => (name == wanted).then_some(value),
            Self::All(all) => {
                all.iter().rev().find(|(name, _)| *name == wanted).map(|(_, value)| value)
            }
        }
    }
}

/// What an expression can see: the document and the variables.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope<'a> {
    root: Option<&'a Document>,
    frame: Option<&'a Frame<'a>>,
    variables: Option<&'a Document>,
}

impl<'a> Scope<'a> {
    /// With the variables of a command (its `let`, and `NOW`).
    #[must_use]
    pub fn with_variables(variables: &'a Document) -> Self {
        Self { root: None, frame: None, variables: Some(variables) }
    }

    /// The same on another document.
    #[must_use]
    pub fn rooted(&self, root: &'a Document) -> Self {
        Self { root: Some(root), ..*self }
    }

    /// The variables of the command.
    #[must_use]
    pub fn variables(&self) -> Option<&'a Document> {
        self.variables
    }

    fn lookup(&self, name: &str) -> Option<&'a Bson> {
        let mut frame = self.frame;
        while let Some(here) = frame {
            if let Some(value) = here.held.get(name) {
                return Some(value);
            }
            frame = here.outer;
        }
        self.variables?.get(name)
    }
}

/// A parsed expression.
#[derive(Clone, Debug)]
pub enum Expression {
    /// A constant.
    Literal(Bson),
    /// A path from the document.
    Field(Vec<String>),
    /// A path from a variable.
    Variable(String, Vec<String>),
    /// A document of expressions.
    Document(Vec<(String, Expression)>),
    /// An array of expressions.
    Array(Vec<Expression>),
    /// An operator and its arguments.
    Call(Op, Vec<Expression>),
    /// `$let`.
    Let(Vec<(String, Expression)>, Box<Expression>),
    /// `$map`: input, variable, body.
    Map(Box<Expression>, String, Box<Expression>),
    /// `$filter`: input, variable, condition, limit.
    Filter(Box<Expression>, String, Box<Expression>, Option<Box<Expression>>),
    /// `$reduce`: input, first value, body.
    Reduce(Box<Expression>, Box<Expression>, Box<Expression>),
    /// `$switch`: branches, default.
    Switch(Vec<(Expression, Expression)>, Option<Box<Expression>>),
    /// `$sortArray` by a specification.
    SortArray(Box<Expression>, crate::sort::Order),
}

macro_rules! operators {
    ($($name:literal $variant:ident $least:literal $most:expr,)*) => {
        /// The operators that evaluate all their arguments.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "named after MongoDB's operators")]
        pub enum Op { $($variant),* }

        impl Op {
            /// The operator of a name, with how many arguments it takes.
            #[must_use]
            pub fn named(name: &str) -> Option<(Self, usize, usize)> {
                Some(match name { $($name => (Self::$variant, $least, $most),)* _ => return None })
            }

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}

const MANY: usize = usize::MAX;

operators! {
    "$abs" Abs 1 1, "$add" Add 0 MANY, "$ceil" Ceil 1 1, "$divide" Divide 2 2, "$exp" Exp 1 1,
    "$floor" Floor 1 1, "$ln" Ln 1 1, "$log" Log 2 2, "$log10" Log10 1 1, "$mod" Mod 2 2,
    "$multiply" Multiply 0 MANY, "$pow" Pow 2 2, "$round" Round 1 2, "$sqrt" Sqrt 1 1,
    "$subtract" Subtract 2 2, "$trunc" Trunc 1 2, "$bitAnd" BitAnd 0 MANY, "$bitOr" BitOr 0 MANY,
    "$bitXor" BitXor 0 MANY, "$bitNot" BitNot 1 1, "$sin" Sin 1 1, "$cos" Cos 1 1, "$tan" Tan 1 1,
    "$asin" Asin 1 1, "$acos" Acos 1 1, "$atan" Atan 1 1, "$atan2" Atan2 2 2,
    "$degreesToRadians" DegreesToRadians 1 1, "$radiansToDegrees" RadiansToDegrees 1 1,
    "$and" And 0 MANY, "$or" Or 0 MANY, "$not" Not 1 1,
    "$cmp" Cmp 2 2, "$eq" Eq 2 2, "$ne" Ne 2 2, "$gt" Gt 2 2, "$gte" Gte 2 2, "$lt" Lt 2 2,
    "$lte" Lte 2 2, "$ifNull" IfNull 2 MANY, "$cond" Cond 3 3,
    "$arrayElemAt" ArrayElemAt 2 2, "$arrayToObject" ArrayToObject 1 1,
    "$concatArrays" ConcatArrays 0 MANY, "$first" First 1 1, "$last" Last 1 1, "$in" In 2 2,
    "$indexOfArray" IndexOfArray 2 4, "$isArray" IsArray 1 1, "$objectToArray" ObjectToArray 1 1,
    "$range" Range 2 3, "$reverseArray" ReverseArray 1 1, "$size" Size 1 1, "$slice" Slice 2 3,
    "$zip" Zip 3 3, "$allElementsTrue" AllElementsTrue 1 1, "$anyElementTrue" AnyElementTrue 1 1,
    "$setDifference" SetDifference 2 2, "$setEquals" SetEquals 2 MANY,
    "$setIntersection" SetIntersection 0 MANY, "$setIsSubset" SetIsSubset 2 2,
    "$setUnion" SetUnion 0 MANY, "$firstN" FirstN 2 2, "$lastN" LastN 2 2, "$maxN" MaxN 2 2,
    "$minN" MinN 2 2, "$max" Max 1 MANY, "$min" Min 1 MANY, "$sum" Sum 1 MANY, "$avg" Avg 1 MANY,
    "$mergeObjects" MergeObjects 0 MANY, "$getField" GetField 2 2, "$setField" SetField 3 3,
    "$unsetField" UnsetField 2 2, "$stdDevPop" StdDevPop 1 MANY, "$stdDevSamp" StdDevSamp 1 MANY,
    "$concat" Concat 0 MANY, "$indexOfBytes" IndexOfBytes 2 4, "$indexOfCP" IndexOfCP 2 4,
    "$split" Split 2 2, "$strLenBytes" StrLenBytes 1 1, "$strLenCP" StrLenCP 1 1,
    "$strcasecmp" Strcasecmp 2 2, "$substr" Substr 3 3, "$substrBytes" SubstrBytes 3 3,
    "$substrCP" SubstrCP 3 3, "$toLower" ToLower 1 1, "$toUpper" ToUpper 1 1, "$trim" Trim 2 2,
    "$ltrim" Ltrim 2 2, "$rtrim" Rtrim 2 2, "$regexMatch" RegexMatch 3 3,
    "$regexFind" RegexFind 3 3, "$regexFindAll" RegexFindAll 3 3, "$replaceOne" ReplaceOne 3 3,
    "$replaceAll" ReplaceAll 3 3,
    "$year" Year 1 2, "$month" Month 1 2, "$dayOfMonth" DayOfMonth 1 2, "$dayOfWeek" DayOfWeek 1 2,
    "$dayOfYear" DayOfYear 1 2, "$hour" Hour 1 2, "$minute" Minute 1 2, "$second" Second 1 2,
    "$millisecond" Millisecond 1 2, "$week" Week 1 2, "$isoWeek" IsoWeek 1 2,
    "$isoWeekYear" IsoWeekYear 1 2, "$isoDayOfWeek" IsoDayOfWeek 1 2,
    "$dateToString" DateToString 4 4, "$dateFromString" DateFromString 5 5,
    "$dateToParts" DateToParts 3 3, "$dateFromParts" DateFromParts 11 11,
    "$dateAdd" DateAdd 4 4, "$dateSubtract" DateSubtract 4 4, "$dateDiff" DateDiff 5 5,
    "$dateTrunc" DateTrunc 5 5,
    "$convert" Convert 4 4, "$toBool" ToBool 1 1, "$toDate" ToDate 1 1,
    "$toDecimal" ToDecimal 1 1, "$toDouble" ToDouble 1 1, "$toInt" ToInt 1 1, "$toLong" ToLong 1 1,
    "$toObjectId" ToObjectId 1 1, "$toString" ToString 1 1, "$type" Type 1 1,
    "$isNumber" IsNumber 1 1, "$rand" Rand 0 0, "$binarySize" BinarySize 1 1,
    "$bsonSize" BsonSize 1 1, "$tsSecond" TsSecond 1 1, "$tsIncrement" TsIncrement 1 1,
}

impl Expression {
    /// Calls `visit` with each path that is equal to a plain value wherever the expression is true,
    /// as far as `$eq` and `$and` say so. Not with null, which a path that reaches nothing is not
    /// equal to here but has in an index, nor with arrays.
    pub fn equalities(&self, scope: &Scope<'_>, visit: &mut dyn FnMut(&[String], Bson)) {
        let constant = |expression: &Self| match expression {
            Self::Literal(value) => Some(value.clone()),
            Self::Variable(name, _) if scope.lookup(name).is_some() => {
                expression.evaluate(scope).ok()
            }
            _ => None,
        };
        match self {
            Self::Call(Op::And, parts) => parts.iter().for_each(|one| one.equalities(scope, visit)),
            Self::Call(Op::Eq, sides) => {
                let [left, right] = sides.as_slice() else { return };
                for (field, other) in [(left, right), (right, left)] {
                    if let (Self::Field(path), Some(value)) = (field, constant(other))
                        && !matches!(value, Bson::Null | Bson::Undefined | Bson::Array(_))
                        && value != MISSING
                    {
                        visit(path, value);
                    }
                }
            }
            _ => {}
        }
    }

    /// Parses an expression.
    ///
    /// Errors: an unknown operator, a wrong number of arguments, nesting past 100.
    pub fn parse(source: &Bson) -> Result<Self> {
        parse::expression(source, 0)
    }

    /// Its value; [`MISSING`] where there is none.
    ///
    /// Errors: MongoDB's, of the operator that cannot work on its arguments.
    pub fn evaluate(&self, scope: &Scope<'_>) -> Result<Bson> {
        match self {
            Self::Literal(value) => Ok(value.clone()),
            Self::Field(parts) => Ok(match scope.lookup("CURRENT") {
                Some(current) => path::get(current, parts).unwrap_or(MISSING),
                None => scope.root.and_then(|root| path::get_in(root, parts)).unwrap_or(MISSING),
            }),
            Self::Variable(name, parts) => variable(name, parts, scope),
            Self::Document(fields) => {
                let mut document = Document::new();
                for (name, expression) in fields {
                    let value = expression.evaluate(scope)?;
                    if value != MISSING {
                        document.insert(name.clone(), value);
                    }
                }
                bounded(Bson::Document(document))
            }
            Self::Array(elements) => {
                let mut array = Vec::with_capacity(elements.len());
                for element in elements {
                    array.push(match element.evaluate(scope)? {
                        MISSING => Bson::Null,
                        value => value,
                    });
                }
                bounded(Bson::Array(array))
            }
            Self::Call(op, arguments) => call(*op, arguments, scope),
            Self::Let(bindings, body) => {
                let mut values = Vec::with_capacity(bindings.len());
                for (name, expression) in bindings {
                    values.push((name.as_str(), expression.evaluate(scope)?));
                }
                let frame = Frame { held: Held::All(&values), outer: scope.frame };
                body.evaluate(&Scope { frame: Some(&frame), ..*scope })
            }
            Self::Map(input, name, body) => {
                let Some(elements) = array_of("$map", input.evaluate(scope)?)? else {
                    return Ok(Bson::Null);
                };
                let mut mapped = Vec::with_capacity(elements.len());
                let mut lease = Lease::default();
                for element in elements {
                    let value = with(name, &element, scope, |inner| body.evaluate(inner))?;
                    lease.grow(32 + size_of_value(&value), Memory::alone)?;
                    mapped.push(if value == MISSING { Bson::Null } else { value });
                }
                bounded(Bson::Array(mapped))
            }
            Self::Filter(input, name, condition, limit) => {
                let Some(elements) = array_of("$filter", input.evaluate(scope)?)? else {
                    return Ok(Bson::Null);
                };
                let limit = match limit {
                    Some(limit) => match limit.evaluate(scope)? {
                        value if is_nullish(&value) => usize::MAX,
                        value => match crate::value::integral(&value) {
                            Some(count) if count >= 1 => count as usize,
                            _ => {
                                return fail(
                                    Code::BadValue,
                                    "$filter: limit must be a positive integer",
                                );
                            }
                        },
                    },
                    None => usize::MAX,
                };
                let mut kept = Vec::new();
                for element in elements {
                    if kept.len() >= limit {
                        break;
                    }
                    if truthy(&with(name, &element, scope, |inner| condition.evaluate(inner))?) {
                        kept.push(element);
                    }
                }
                Ok(Bson::Array(kept))
            }
            Self::Reduce(input, first, body) => {
                let Some(elements) = array_of("$reduce", input.evaluate(scope)?)? else {
                    return Ok(Bson::Null);
                };
                let mut value = first.evaluate(scope)?;
                for element in elements {
                    let next = with("value", &value, scope, |outer| {
                        with("this", &element, outer, |inner| body.evaluate(inner))
                    })?;
                    // Each round may nest what the round before it made.
                    value = bounded(next)?;
                }
                Ok(value)
            }
            Self::Switch(branches, default) => {
                for (case, then) in branches {
                    if truthy(&case.evaluate(scope)?) {
                        return then.evaluate(scope);
                    }
                }
                match default {
                    Some(default) => default.evaluate(scope),
                    None => fail(
                        Code::BadValue,
                        "$switch could not find a matching branch for an input, and no default was specified.",
                    ),
                }
            }
            Self::SortArray(input, order) => match input.evaluate(scope)? {
                Bson::Array(mut elements) => {
                    order.sort_values(&mut elements);
                    Ok(Bson::Array(elements))
                }
                value if is_nullish(&value) => Ok(Bson::Null),
                _ => fail(Code::BadValue, "The input argument to $sortArray must be an array"),
            },
        }
    }

    /// The constant it is, if it is one.
    #[must_use]
    pub fn constant(&self) -> Option<&Bson> {
        match self {
            Self::Literal(value) => Some(value),
            _ => None,
        }
    }
}

fn variable(name: &str, parts: &[String], scope: &Scope<'_>) -> Result<Bson> {
    if let Some(value) = scope.lookup(name) {
        return Ok(path::get(value, parts).unwrap_or(MISSING));
    }
    match name {
        "ROOT" | "CURRENT" => Ok(match scope.root {
            Some(root) if parts.is_empty() => Bson::Document(root.clone()),
            Some(root) => path::get_in(root, parts).unwrap_or(MISSING),
            None => MISSING,
        }),
        "REMOVE" => Ok(MISSING),
        "NOW" => Ok(Bson::DateTime(DateTime::now())),
        "CLUSTER_TIME" => Ok(MISSING),
        "DESCEND" | "PRUNE" | "KEEP" => Ok(Bson::String(name.to_ascii_lowercase())),
        other => fail(Code::UnknownVariable, format!("Use of undefined variable: {other}")),
    }
}

fn with<R>(name: &str, value: &Bson, scope: &Scope<'_>, body: impl FnOnce(&Scope<'_>) -> R) -> R {
    let frame = Frame { held: Held::One(name, value), outer: scope.frame };
    body(&Scope { root: scope.root, frame: Some(&frame), variables: scope.variables })
}

fn array_of(name: &str, value: Bson) -> Result<Option<Vec<Bson>>> {
    match value {
        Bson::Array(elements) => Ok(Some(elements)),
        value if is_nullish(&value) => Ok(None),
        other => fail(
            Code::BadValue,
            format!("input to {name} must be an array not {}", crate::value::type_name(&other)),
        ),
    }
}

fn call(op: Op, arguments: &[Expression], scope: &Scope<'_>) -> Result<Bson> {
    // Those that look at an argument only when they need it.
    match op {
        Op::And => {
            for argument in arguments {
                if !truthy(&argument.evaluate(scope)?) {
                    return Ok(Bson::Boolean(false));
                }
            }
            return Ok(Bson::Boolean(true));
        }
        Op::Or => {
            for argument in arguments {
                if truthy(&argument.evaluate(scope)?) {
                    return Ok(Bson::Boolean(true));
                }
            }
            return Ok(Bson::Boolean(false));
        }
        Op::Cond => {
            let [test, then, otherwise] = arguments else { return Ok(MISSING) };
            return if truthy(&test.evaluate(scope)?) { then } else { otherwise }.evaluate(scope);
        }
        Op::IfNull => {
            let mut value = MISSING;
            for argument in arguments {
                value = argument.evaluate(scope)?;
                if !is_nullish(&value) {
                    break;
                }
            }
            return Ok(value);
        }
        _ => {}
    }
    let mut values = Vec::with_capacity(arguments.len());
    for argument in arguments {
        values.push(argument.evaluate(scope)?);
    }
    apply(op, values).and_then(bounded)
}

/// An operator on values.
///
/// Errors: those of the operator.
pub fn apply(op: Op, values: Vec<Bson>) -> Result<Bson> {
    if let Some(result) = arithmetic::apply(op, &values) {
        return result;
    }
    if let Some(result) = strings::apply(op, &values) {
        return result;
    }
    if let Some(result) = dates::apply(op, &values) {
        return result;
    }
    if let Some(result) = convert::apply(op, &values) {
        return result;
    }
    arrays::apply(op, values)
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    fn evaluate(source: Bson) -> Bson {
        let document = doc! { "a": 2, "b": 3.5, "s": "Grüße", "l": [3, 1, 2], "n": Bson::Null,
        "d": DateTime::parse_rfc3339_str("2024-02-29T13:14:15.016Z").unwrap(),
        "o": { "x": [ { "y": 1 }, { "y": 2 } ] } };
        Expression::parse(&source).unwrap().evaluate(&Scope::default().rooted(&document)).unwrap()
    }

    #[test]
    fn arithmetic_keeps_the_widest_type() {
        assert_eq!(evaluate(bson!({ "$add": ["$a", 1] })), Bson::Int32(3));
        assert_eq!(evaluate(bson!({ "$multiply": ["$a", "$b"] })), Bson::Double(7.0));
        assert_eq!(evaluate(bson!({ "$divide": ["$a", 4] })), Bson::Double(0.5));
        assert_eq!(evaluate(bson!({ "$mod": [7, "$a"] })), Bson::Int32(1));
        assert_eq!(evaluate(bson!({ "$add": ["$a", "$n"] })), Bson::Null);
        assert_eq!(evaluate(bson!({ "$round": [2.5] })), Bson::Double(2.0));
        assert_eq!(evaluate(bson!({ "$trunc": [12.78, 1] })), Bson::Double(12.7));
        assert_eq!(evaluate(bson!({ "$pow": [2, 10] })), Bson::Int32(1024));
    }

    #[test]
    fn conditions_and_variables_work() {
        assert_eq!(
            evaluate(bson!({ "$cond": [{ "$gt": ["$a", 1] }, "yes", "no"] })),
            Bson::String("yes".into())
        );
        assert_eq!(evaluate(bson!({ "$ifNull": ["$n", "$zz", 7] })), Bson::Int32(7));
        assert_eq!(
            evaluate(bson!({ "$let": { "vars": { "k": 5 }, "in": { "$add": ["$$k", "$a"] } } })),
            Bson::Int32(7)
        );
        assert_eq!(
            evaluate(
                bson!({ "$switch": { "branches": [ { "case": false, "then": 1 } ], "default": 2 } })
            ),
            Bson::Int32(2)
        );
    }

    #[test]
    fn arrays_are_mapped_filtered_and_folded() {
        assert_eq!(
            evaluate(bson!({ "$map": { "input": "$l", "as": "e", "in": { "$add": ["$$e", 1] } } })),
            bson!([4, 2, 3])
        );
        assert_eq!(
            evaluate(bson!({ "$filter": { "input": "$l", "cond": { "$gt": ["$$this", 1] } } })),
            bson!([3, 2])
        );
        assert_eq!(
            evaluate(
                bson!({ "$reduce": { "input": "$l", "initialValue": 0, "in": { "$add": ["$$value", "$$this"] } } })
            ),
            Bson::Int32(6)
        );
        assert_eq!(evaluate(bson!({ "$slice": ["$l", -2] })), bson!([1, 2]));
        assert_eq!(
            evaluate(bson!({ "$sortArray": { "input": "$l", "sortBy": 1 } })),
            bson!([1, 2, 3])
        );
        assert_eq!(evaluate(bson!("$o.x.y")), bson!([1, 2]));
        assert_eq!(evaluate(bson!({ "$arrayElemAt": ["$l", -1] })), Bson::Int32(2));
        assert_eq!(evaluate(bson!({ "$setUnion": [[1, 2], [2, 3]] })), bson!([1, 2, 3]));
        assert_eq!(evaluate(bson!({ "$range": [0, 5, 2] })), bson!([0, 2, 4]));
        assert_eq!(evaluate(bson!({ "$zip": { "inputs": [[1, 2], ["a"]] } })), bson!([[1, "a"]]));
    }

    #[test]
    fn strings_count_bytes_and_letters() {
        assert_eq!(evaluate(bson!({ "$strLenBytes": "$s" })), Bson::Int32(7));
        assert_eq!(evaluate(bson!({ "$strLenCP": "$s" })), Bson::Int32(5));
        assert_eq!(evaluate(bson!({ "$substrCP": ["$s", 1, 3] })), Bson::String("rüß".into()));
        assert_eq!(evaluate(bson!({ "$concat": ["$s", "!"] })), Bson::String("Grüße!".into()));
        assert_eq!(evaluate(bson!({ "$split": ["a,b", ","] })), bson!(["a", "b"]));
        assert_eq!(evaluate(bson!({ "$trim": { "input": "  x " } })), Bson::String("x".into()));
        assert_eq!(
            evaluate(bson!({ "$regexMatch": { "input": "$s", "regex": "^gr", "options": "i" } })),
            Bson::Boolean(true)
        );
        assert_eq!(
            evaluate(
                bson!({ "$replaceAll": { "input": "aXbX", "find": "X", "replacement": "-" } })
            ),
            Bson::String("a-b-".into())
        );
    }

    #[test]
    fn dates_are_taken_apart_and_formatted() {
        assert_eq!(evaluate(bson!({ "$year": "$d" })), Bson::Int32(2024));
        assert_eq!(evaluate(bson!({ "$dayOfYear": "$d" })), Bson::Int32(60));
        assert_eq!(evaluate(bson!({ "$isoWeek": "$d" })), Bson::Int32(9));
        assert_eq!(
            evaluate(
                bson!({ "$dateToString": { "date": "$d", "format": "%Y-%m-%d %H:%M:%S.%L %z", "timezone": "+02:00" } })
            ),
            Bson::String("2024-02-29 15:14:15.016 +0200".into())
        );
        assert_eq!(
            evaluate(
                bson!({ "$dateDiff": { "startDate": "$d", "endDate": { "$dateAdd": { "startDate": "$d", "unit": "month", "amount": 2 } }, "unit": "day" } })
            ),
            Bson::Int64(60)
        );
        assert_eq!(
            evaluate(
                bson!({ "$dateToString": { "date": { "$dateTrunc": { "date": "$d", "unit": "hour" } } } })
            ),
            Bson::String("2024-02-29T13:00:00.000Z".into())
        );
    }

    #[test]
    fn a_few_bytes_cannot_make_a_value_without_bounds() {
        let fold = |first: Bson, body: Bson| {
            let source = bson!({ "$reduce": { "input": { "$range": [0, 100_000] }, "initialValue": first, "in": body } });
            Expression::parse(&source).unwrap().evaluate(&Scope::default()).unwrap_err().code
        };
        assert_eq!(fold(Bson::Null, bson!({ "a": "$$value" })), Code::Overflow);
        assert_eq!(fold(Bson::Null, bson!(["$$value"])), Code::Overflow);
        assert_eq!(
            fold(bson!("aa"), bson!({ "$concat": ["$$value", "$$value"] })),
            Code::ExceededMemoryLimit
        );
        assert_eq!(
            fold(bson!([1]), bson!({ "$concatArrays": ["$$value", "$$value"] })),
            Code::ExceededMemoryLimit
        );
        let vars: Document = (0..100_000).map(|n| (format!("v{n}"), Bson::Int32(n))).collect();
        assert_eq!(evaluate(bson!({ "$let": { "vars": vars, "in": "$$v7" } })), Bson::Int32(7));
    }

    #[test]
    fn conversions_follow_the_table() {
        assert_eq!(evaluate(bson!({ "$toInt": "12" })), Bson::Int32(12));
        assert_eq!(evaluate(bson!({ "$toString": 1.5 })), Bson::String("1.5".into()));
        assert_eq!(evaluate(bson!({ "$toBool": 0 })), Bson::Boolean(false));
        assert_eq!(evaluate(bson!({ "$type": "$zz" })), Bson::String("missing".into()));
        assert_eq!(
            evaluate(bson!({ "$convert": { "input": "x", "to": "int", "onError": -1 } })),
            Bson::Int32(-1)
        );
        assert!(Expression::parse(&bson!({ "$nope": 1 })).is_err());
        assert!(Expression::parse(&bson!({ "$abs": [1, 2] })).is_err());
    }
}
