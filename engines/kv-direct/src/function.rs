//! Functions on the elements of values, registered before clients start and named by number.
//!
//! A value is an array of elements of 1, 2, 4 or 8 bytes, little-endian. A function works on whole
//! slices of elements, so that the compiler makes vector code of each, for updates of long values in the widest
//! vectors that the processor has; what a slice means for an update, a reduction or a filter is the same for
//! every function.
//!
//! | number | name | update: v, d | reduce: v, s | filter: v |
//! | --- | --- | --- | --- | --- |
//! | 1 | add | v + d, wrapping | s + v | v != 0 |
//! | 2 | subtract | v - d, wrapping | s - v | |
//! | 3 | max | the larger | the larger | |
//! | 4 | min | the smaller | the smaller | |
//! | 5 | and | v & d | s & v | |
//! | 6 | or | v \| d | s \| v | |
//! | 7 | xor | v ^ d | s ^ v | |
//! | 8 | exchange | d | | |
//! | 9 | compare-and-swap | new where v = expected; d is expected, then new | | |
//! | 10 | add float | v + d, f32 or f64 | s + v | v != 0 |
//! | 11 | max float | the larger, f32 or f64 | the larger | |
//!
//! Numbers from 128 on are for functions that a program registers.
//!
//! Source: spec/kv-direct.md 5.4, 6.1.

use std::fmt;

use beeline_os::vectors::{Wide, widest};

/// Bytes of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Width {
    /// 1 byte.
    One,
    /// 2 bytes.
    Two,
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
}

impl Width {
    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// From its bytes.
    #[must_use]
    pub fn of_bytes(bytes: usize) -> Option<Self> {
        [Self::One, Self::Two, Self::Four, Self::Eight].into_iter().find(|w| w.bytes() == bytes)
    }

    /// From a packet's code: the logarithm of the width.
    #[must_use]
    pub fn of_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::One,
            1 => Self::Two,
            2 => Self::Four,
            3 => Self::Eight,
            _ => return None,
        })
    }

    /// For a packet.
    #[must_use]
    pub fn code(self) -> u8 {
        self.bytes().trailing_zeros() as u8
    }
}

/// Changes each element of `value` by the element of `delta` at its place, or by the one element that
/// `delta` is. False where the lengths do not fit each other: `value`, which is the store's own memory, is
/// then as it was.
pub type Update = fn(value: &mut [u8], delta: &[u8]) -> bool;
/// Folds the elements of `value` into `sum`. False where the lengths do not fit.
pub type Reduce = fn(value: &[u8], sum: &mut [u8]) -> bool;
/// Appends the elements of `value` that satisfy it to `out`. False where the lengths do not fit.
pub type Filter = fn(value: &[u8], out: &mut Vec<u8>) -> bool;

/// A function for elements of one width; what it lacks is refused.
#[derive(Clone, Copy, Default)]
pub struct Function {
    /// For updates.
    pub update: Option<Update>,
    /// For reductions.
    pub reduce: Option<Reduce>,
    /// For filters.
    pub filter: Option<Filter>,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("update", &self.update.is_some())
            .field("reduce", &self.reduce.is_some())
            .field("filter", &self.filter.is_some())
            .finish()
    }
}

/// The functions a processor knows.
#[derive(Clone, Debug)]
pub struct Functions {
    known: Vec<[Function; 4]>,
}

/// The first number for functions of a program's own.
pub const FIRST_OWN: u8 = 128;

/// Numbers of the built-in functions.
pub mod number {
    /// Adds, wrapping.
    pub const ADD: u8 = 1;
    /// Subtracts, wrapping.
    pub const SUBTRACT: u8 = 2;
    /// Takes the larger.
    pub const MAX: u8 = 3;
    /// Takes the smaller.
    pub const MIN: u8 = 4;
    /// Keeps bits that both have.
    pub const AND: u8 = 5;
    /// Keeps bits that either has.
    pub const OR: u8 = 6;
    /// Keeps bits that one has.
    pub const XOR: u8 = 7;
    /// Stores the parameter.
    pub const EXCHANGE: u8 = 8;
    /// Stores the second half of the parameter where the element equals the first.
    pub const COMPARE_AND_SWAP: u8 = 9;
    /// Adds floating-point numbers of 4 or 8 bytes.
    pub const ADD_FLOAT: u8 = 10;
    /// Takes the larger floating-point number of 4 or 8 bytes.
    pub const MAX_FLOAT: u8 = 11;
}

/// Values of so many bytes are worth the choice of a width.
const WIDE_BYTES: usize = 64;

/// An update of every element.
struct Each<'a, const N: usize, F> {
    value: &'a mut [u8],
    delta: &'a [u8],
    f: F,
}

impl<const N: usize, F: Fn([u8; N], [u8; N]) -> [u8; N]> Wide for Each<'_, N, F> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let Self { value, delta, f } = self;
        let (elements, rest) = value.as_chunks_mut::<N>();
        let (deltas, delta_rest) = delta.as_chunks::<N>();
        if !rest.is_empty() || !delta_rest.is_empty() {
            return false;
        }
        match deltas {
            [one] => elements.iter_mut().for_each(|element| *element = f(*element, *one)),
            many if many.len() == elements.len() => {
                elements
                    .iter_mut()
                    .zip(many)
                    .for_each(|(element, delta)| *element = f(*element, *delta));
            }
            _ => return false,
        }
        true
    }
}

/// Applies `f` to each element of `value` with the parameter at its place, or the one for all.
#[inline(always)]
fn each<const N: usize>(
    value: &mut [u8],
    delta: &[u8],
    f: impl Fn([u8; N], [u8; N]) -> [u8; N],
) -> bool {
    let narrow = value.len() < WIDE_BYTES;
    let each = Each { value, delta, f };
    if narrow { each.run() } else { widest(each) }
}

#[inline(always)]
fn fold<const N: usize>(
    value: &[u8],
    sum: &mut [u8],
    f: impl Fn([u8; N], [u8; N]) -> [u8; N],
) -> bool {
    let (elements, rest) = value.as_chunks::<N>();
    let Ok(sum) = <&mut [u8; N]>::try_from(sum) else { return false };
    if !rest.is_empty() {
        return false;
    }
    // Folded in a local: the compiler keeps it in a register.
    *sum = elements.iter().fold(*sum, |sum, element| f(sum, *element));
    true
}

#[inline(always)]
fn keep<const N: usize>(value: &[u8], out: &mut Vec<u8>, f: impl Fn([u8; N]) -> bool) -> bool {
    let (elements, rest) = value.as_chunks::<N>();
    elements.iter().filter(|element| f(**element)).for_each(|element| out.extend(element));
    rest.is_empty()
}

/// A function of two numbers for one type, as updates and reductions; optionally a filter of
/// elements that are not zero.
macro_rules! of {
    ($type:ty, $f:expr) => {{
        const N: usize = size_of::<$type>();
        fn combine(v: [u8; N], d: [u8; N]) -> [u8; N] {
            let f: fn($type, $type) -> $type = $f;
            f(<$type>::from_le_bytes(v), <$type>::from_le_bytes(d)).to_le_bytes()
        }
        Function {
            update: Some(|value, delta| each::<N>(value, delta, combine)),
            reduce: Some(|value, sum| fold::<N>(value, sum, combine)),
            filter: Some(|value, out| keep::<N>(value, out, |v| v != [0; N])),
        }
    }};
}

macro_rules! integers {
    ($f:ident) => {
        [
            of!(u8, |v, d| v.$f(d)),
            of!(u16, |v, d| v.$f(d)),
            of!(u32, |v, d| v.$f(d)),
            of!(u64, |v, d| v.$f(d)),
        ]
    };
}

macro_rules! swap {
    ($n:literal) => {
        Function {
            update: Some(|value, delta| {
                let (Ok(value), Some((expected, new))) =
                    (<&mut [u8; $n]>::try_from(value), delta.split_at_checked($n))
                else {
                    return false;
                };
                let Ok(new) = <[u8; $n]>::try_from(new) else { return false };
                if value == expected {
                    *value = new;
                }
                true
            }),
            reduce: None,
            filter: None,
        }
    };
}

impl Default for Functions {
    fn default() -> Self {
        use std::ops::{BitAnd, BitOr, BitXor};
        let none = [Function::default(); 4];
        let plain = |mut set: [Function; 4]| {
            set.iter_mut().for_each(|function| function.filter = None);
            set
        };
        let mut known = vec![none; 256];
        known[usize::from(number::ADD)] = integers!(wrapping_add);
        known[usize::from(number::SUBTRACT)] = plain(integers!(wrapping_sub));
        known[usize::from(number::MAX)] = plain(integers!(max));
        known[usize::from(number::MIN)] = plain(integers!(min));
        known[usize::from(number::AND)] = plain(integers!(bitand));
        known[usize::from(number::OR)] = plain(integers!(bitor));
        known[usize::from(number::XOR)] = plain(integers!(bitxor));
        let mut exchange =
            plain([of!(u8, |_, d| d), of!(u16, |_, d| d), of!(u32, |_, d| d), of!(u64, |_, d| d)]);
        exchange.iter_mut().for_each(|function| function.reduce = None);
        known[usize::from(number::EXCHANGE)] = exchange;
        known[usize::from(number::COMPARE_AND_SWAP)] = [swap!(1), swap!(2), swap!(4), swap!(8)];
        known[usize::from(number::ADD_FLOAT)] =
            [none[0], none[0], of!(f32, |v, d| v + d), of!(f64, |v, d| v + d)];
        known[usize::from(number::MAX_FLOAT)] =
            plain([none[0], none[0], of!(f32, |v, d| v.max(d)), of!(f64, |v, d| v.max(d))]);
        Self { known }
    }
}

impl Functions {
    /// Adds a function of the program's own.
    ///
    /// Invariant: `number` is [`FIRST_OWN`] or more, and not taken for this width; asserted.
    pub fn register(&mut self, number: u8, width: Width, function: Function) {
        let slot = &mut self.known[usize::from(number)][usize::from(width.code())];
        let free = slot.update.is_none() && slot.reduce.is_none() && slot.filter.is_none();
        assert!(number >= FIRST_OWN && free, "function {number} is taken or built in");
        *slot = function;
    }

    /// The function of this number for elements of this width.
    #[must_use]
    #[inline]
    pub fn get(&self, number: u8, width: Width) -> &Function {
        &self.known[usize::from(number)][usize::from(width.code())]
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn vectors_agree_with_one_element_at_a_time(
            values in proptest::collection::vec(any::<u32>(), 0..70),
            scalar in any::<u32>(),
        ) {
            let functions = Functions::default();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let deltas: Vec<u8> = values.iter().rev().flat_map(|v| v.to_le_bytes()).collect();
            type Plain = fn(u32, u32) -> u32;
            let cases: [(u8, Plain); 7] = [
                (number::ADD, u32::wrapping_add),
                (number::SUBTRACT, u32::wrapping_sub),
                (number::MAX, u32::max),
                (number::MIN, u32::min),
                (number::AND, |a, b| a & b),
                (number::XOR, |a, b| a ^ b),
                (number::EXCHANGE, |_, b| b),
            ];
            for (number, plain) in cases {
                let function = functions.get(number, Width::Four);
                let update = function.update.unwrap();
                let mut by_scalar = bytes.clone();
                prop_assert!(update(&mut by_scalar, &scalar.to_le_bytes()));
                let expected: Vec<u8> =
                    values.iter().flat_map(|v| plain(*v, scalar).to_le_bytes()).collect();
                prop_assert_eq!(by_scalar, expected);
                if values.len() != 1 {
                    let mut by_vector = bytes.clone();
                    prop_assert!(update(&mut by_vector, &deltas));
                    let expected: Vec<u8> = values.iter().zip(values.iter().rev())
                        .flat_map(|(v, d)| plain(*v, *d).to_le_bytes()).collect();
                    prop_assert_eq!(by_vector, expected);
                }
                if let Some(reduce) = function.reduce {
                    let mut sum = scalar.to_le_bytes();
                    prop_assert!(reduce(&bytes, &mut sum));
                    let expected = values.iter().fold(scalar, |s, v| plain(s, *v));
                    prop_assert_eq!(u32::from_le_bytes(sum), expected);
                }
            }
            let mut kept = Vec::new();
            prop_assert!((functions.get(number::ADD, Width::Four).filter.unwrap())(&bytes, &mut kept));
            prop_assert_eq!(kept.len(), values.iter().filter(|v| **v != 0).count() * 4);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused_and_nothing_changes() {
        let functions = Functions::default();
        let add = functions.get(number::ADD, Width::Eight).update.unwrap();
        let mut value = [1; 16];
        assert!(!add(&mut value, &[1; 24]), "three deltas for two elements");
        assert!(!add(&mut value, &[1; 7]));
        assert!(!add(&mut [1; 15], &[1; 8]), "half an element");
        assert_eq!(value, [1; 16]);
    }

    #[test]
    fn compare_and_swap_stores_only_on_equality() {
        let functions = Functions::default();
        let swap = functions.get(number::COMPARE_AND_SWAP, Width::Four).update.unwrap();
        let mut value = 5_u32.to_le_bytes();
        let parameter =
            |expected: u32, new: u32| [expected.to_le_bytes(), new.to_le_bytes()].concat();
        assert!(swap(&mut value, &parameter(4, 9)) && value == 5_u32.to_le_bytes());
        assert!(swap(&mut value, &parameter(5, 9)) && value == 9_u32.to_le_bytes());
        assert!(!swap(&mut value, &[0; 4]));
    }

    #[test]
    fn floats_add() {
        let functions = Functions::default();
        let add = functions.get(number::ADD_FLOAT, Width::Eight);
        let mut value = 1.5_f64.to_le_bytes();
        assert!(add.update.unwrap()(&mut value, &0.25_f64.to_le_bytes()));
        assert_eq!(f64::from_le_bytes(value), 1.75);
        assert!(functions.get(number::ADD_FLOAT, Width::One).update.is_none());
    }

    #[test]
    #[should_panic(expected = "taken or built in")]
    fn a_number_is_registered_once() {
        let mut functions = Functions::default();
        let mine = Function { filter: Some(|_, _| true), ..Function::default() };
        functions.register(FIRST_OWN, Width::One, mine);
        functions.register(FIRST_OWN, Width::One, mine);
    }
}
