//! The types of knobs: each reads and shows itself, and says what would have been right.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use super::{Knob, nearest};

/// A number of bytes: `4096`, `64KiB`, `1.5GiB`; in Redis' spelling `64mb`, `1k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

const SUFFIXES: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Redis' units, as CONFIG SET reads them too, in any case: `kb` counts 1,024 and `k` 1,000.
const REDIS_SUFFIXES: [(&str, u64); 8] = [
    ("tb", 1 << 40),
    ("gb", 1 << 30),
    ("mb", 1 << 20),
    ("kb", 1 << 10),
    ("t", 1_000_000_000_000),
    ("g", 1_000_000_000),
    ("m", 1_000_000),
    ("k", 1_000),
];

impl Knob for Size {
    const PLACEHOLDER: &'static str = "SIZE";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not a size; write bytes or a unit, as in 4096, 512KiB, 64MiB, 1gb")
        };
        let text = text.trim();
        let units = || {
            let own = SUFFIXES.iter().map(|(suffix, unit)| (suffix.to_lowercase(), *unit));
            REDIS_SUFFIXES.iter().map(|(suffix, unit)| ((*suffix).to_owned(), *unit)).chain(own)
        };
        let lower = text.to_ascii_lowercase();
        let (number, unit) = units()
            .find_map(|(suffix, unit)| {
                lower.strip_suffix(&suffix).map(|rest| (rest.trim_end(), unit))
            })
            .unwrap_or((&lower, 1));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 6 {
            return Err(wrong());
        }
        let mut bytes = whole
            .parse::<u64>()
            .ok()
            .and_then(|whole| whole.checked_mul(unit))
            .ok_or_else(|| format!("{text:?} is more bytes than fit in 64 bits"))?;
        if !fraction.is_empty() {
            let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(6));
            let part = fraction.parse::<u128>().map_err(|_| wrong())? * u128::from(unit) / scale;
            bytes = bytes.saturating_add(u64::try_from(part).unwrap_or(u64::MAX));
        }
        Ok(Self(bytes))
    }

    fn show(&self) -> String {
        let exact = SUFFIXES.iter().find(|(_, unit)| self.0 != 0 && self.0.is_multiple_of(*unit));
        match exact {
            Some((suffix, unit)) if *unit > 1 => format!("{}{suffix}", self.0 / unit),
            _ => self.0.to_string(),
        }
    }
}

/// Bytes for people: one decimal, binary units.
#[expect(clippy::cast_precision_loss, reason = "for reading")]
pub fn human_bytes(bytes: u64) -> String {
    for (suffix, unit) in SUFFIXES {
        if bytes >= unit && unit > 1 {
            return format!("{:.1} {suffix}", bytes as f64 / unit as f64);
        }
    }
    format!("{bytes} B")
}

/// A length of time: `20us`, `500ms`, `10s`, `5m`, `2h`; a bare 0 is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

const SPANS: [(&str, u64); 6] = [
    ("us", 1_000),
    ("ms", 1_000_000),
    ("ns", 1),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

impl Knob for Span {
    const PLACEHOLDER: &'static str = "TIME";

    fn parse(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        if trimmed == "0" {
            return Ok(Self(Duration::ZERO));
        }
        SPANS
            .iter()
            .find_map(|(suffix, unit)| {
                let number = trimmed.strip_suffix(suffix)?.trim().parse::<u64>().ok()?;
                number.checked_mul(*unit)
            })
            .map(|nanoseconds| Self(Duration::from_nanos(nanoseconds)))
            .ok_or_else(|| {
                format!("{text:?} is not a time; write a whole number and a unit, as in 20us, 500ms, 10s, 5m")
            })
    }

    fn show(&self) -> String {
        let nanoseconds = u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX);
        if nanoseconds == 0 {
            return "0".to_owned();
        }
        let (suffix, unit) = SPANS
            .iter()
            .filter(|(_, unit)| nanoseconds.is_multiple_of(*unit))
            .max_by_key(|(_, unit)| *unit)
            .unwrap_or(&("ns", 1));
        format!("{}{suffix}", nanoseconds / unit)
    }
}

/// A length of time, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(pub Option<Duration>);

impl Knob for Threshold {
    const PLACEHOLDER: &'static str = "TIME|off";

    fn parse(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        Span::parse(text)
            .map(|span| Self(Some(span.0)))
            .map_err(|problem| format!("{problem}; or off"))
    }

    fn show(&self) -> String {
        self.0.map_or_else(|| "off".to_owned(), |limit| Span(limit).show())
    }
}

/// Where to listen, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Door(pub Option<SocketAddr>);

impl Knob for Door {
    const PLACEHOLDER: &'static str = "ADDRESS";

    fn parse(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let wrong = || {
            format!("{text:?} is not an address; write ADDRESS:PORT, as in 127.0.0.1:6379, or off")
        };
        if let Ok(address) = text.parse() {
            return Ok(Self(Some(address)));
        }
        let address = text.to_socket_addrs().map_err(|_| wrong())?.next().ok_or_else(wrong)?;
        Ok(Self(Some(address)))
    }

    fn show(&self) -> String {
        self.0.map_or_else(|| "off".to_owned(), |address| address.to_string())
    }
}

/// A memory window to serve clients through, or `off`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Window {
    /// None.
    Off,
    /// Between processes of this host.
    Emulated,
    /// In a file, with its parameters: what follows `ntb://`.
    File(String),
}

impl Window {
    /// The fabric's address of it.
    pub fn url(&self) -> Option<String> {
        match self {
            Self::Off => None,
            Self::Emulated => Some("ntb://".to_owned()),
            Self::File(file) => Some(format!("ntb://{file}")),
        }
    }
}

impl Knob for Window {
    const PLACEHOLDER: &'static str = "FILE";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "emulated" => Ok(Self::Emulated),
            file if file.starts_with('/') => Ok(Self::File(file.to_owned())),
            _ => Err(format!(
                "{text:?} is no memory window; write the file to map, as in \
                 /sys/bus/pci/devices/0000:00:04.0/resource2_wc, or emulated, or off"
            )),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Off => "off".to_owned(),
            Self::Emulated => "emulated".to_owned(),
            Self::File(file) => file.clone(),
        }
    }
}

/// One member of a cluster: `1=10.0.0.1:4790@10.0.0.1:6379`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberWord {
    /// Its number, from 1.
    pub id: u16,
    /// Where its fabric door answers, through which members find each other.
    pub log: SocketAddr,
    /// Where its Redis door answers.
    pub resp: SocketAddr,
}

impl MemberWord {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no member; write NUMBER=FABRIC-ADDRESS@RESP-ADDRESS, as in \
                 1=10.0.0.1:4790@10.0.0.1:6379"
            )
        };
        let (id, addresses) = text.split_once('=').ok_or_else(wrong)?;
        let (log, resp) = addresses.split_once('@').ok_or_else(wrong)?;
        let id =
            id.trim().parse().ok().filter(|id| (1..u16::MAX).contains(id)).ok_or_else(wrong)?;
        let address = |text: &str| {
            let address: SocketAddr = text.trim().parse().map_err(|_| wrong())?;
            if address.port() == 0 || address.ip().is_unspecified() {
                return Err(format!("{text:?} is where others reach a member: name its port"));
            }
            Ok(address)
        };
        Ok(Self { id, log: address(log)?, resp: address(resp)? })
    }

    fn show(&self) -> String {
        format!("{}={}@{}", self.id, self.log, self.resp)
    }
}

/// The members of a cluster, apart by commas; empty: none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members(pub Vec<MemberWord>);

impl Knob for Members {
    const PLACEHOLDER: &'static str = "MEMBERS";

    fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() || text == "none" {
            return Ok(Self(Vec::new()));
        }
        let members = text
            .split(',')
            .map(|word| MemberWord::parse(word.trim()))
            .collect::<Result<Vec<_>, _>>()?;
        for (index, member) in members.iter().enumerate() {
            let same = members[index + 1..].iter().find(|other| {
                other.id == member.id || other.log == member.log || other.resp == member.resp
            });
            if let Some(other) = same {
                return Err(format!(
                    "{} and {} are two members with one number or address",
                    member.show(),
                    other.show()
                ));
            }
        }
        Ok(Self(members))
    }

    fn show(&self) -> String {
        let words: Vec<String> = self.0.iter().map(MemberWord::show).collect();
        if words.is_empty() { "none".to_owned() } else { words.join(",") }
    }
}

/// A cluster's identity: sixteen hexadecimal digits; 0: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterWord(pub u64);

impl Knob for ClusterWord {
    const PLACEHOLDER: &'static str = "ID";

    fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(0));
        }
        let hexadecimal = text.len() <= 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        u64::from_str_radix(text, 16).ok().filter(|id| hexadecimal && *id != 0).map(Self).ok_or_else(
            || format!("{text:?} is no cluster; `beeline cluster init` makes one, as in 5f0c31a29be4d870"),
        )
    }

    fn show(&self) -> String {
        if self.0 == 0 { "none".to_owned() } else { format!("{:016x}", self.0) }
    }
}

/// A value, or the program's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto<T> {
    /// `auto`: what fits the machine.
    Detect,
    /// As told.
    Set(T),
}

impl<T: Knob> Knob for Auto<T> {
    const PLACEHOLDER: &'static str = T::PLACEHOLDER;

    fn parse(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Detect);
        }
        T::parse(text).map(Self::Set).map_err(|problem| format!("{problem}; or auto"))
    }

    fn show(&self) -> String {
        match self {
            Self::Detect => "auto".to_owned(),
            Self::Set(value) => value.show(),
        }
    }
}

/// A whole number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number(pub u32);

impl Knob for Number {
    const PLACEHOLDER: &'static str = "NUMBER";

    fn parse(text: &str) -> Result<Self, String> {
        text.trim()
            .parse()
            .map(Self)
            .map_err(|_| format!("{text:?} is not a whole number from 0 to {}", u32::MAX))
    }

    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

impl Knob for Switch {
    const PLACEHOLDER: &'static str = "on|off";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "on" | "true" | "yes" => Ok(Self(true)),
            "off" | "false" | "no" => Ok(Self(false)),
            _ => Err(format!("{text:?} is neither on nor off")),
        }
    }

    fn show(&self) -> String {
        if self.0 { "on" } else { "off" }.to_owned()
    }
}

/// A password; empty for none. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.show())
    }
}

impl Knob for Secret {
    const PLACEHOLDER: &'static str = "PASSWORD";

    fn parse(text: &str) -> Result<Self, String> {
        if text.len() > 512 {
            return Err(format!("a password of {} bytes is too long; the most is 512", text.len()));
        }
        if text.bytes().any(|b| b.is_ascii_control()) {
            return Err("a password with control characters cannot be typed by clients".to_owned());
        }
        Ok(Self(text.to_owned()))
    }

    fn show(&self) -> String {
        if self.0.is_empty() { "none" } else { "(set, not shown)" }.to_owned()
    }
}

/// Names of services, apart by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

impl Names {
    /// Whether `name` is among them.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|known| known == name)
    }
}

impl Knob for Names {
    const PLACEHOLDER: &'static str = "NAME[,NAME]";

    fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::default());
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err(format!(
                "{text:?} has an empty name; write names apart by commas, or none"
            ));
        }
        Ok(Self(names))
    }

    fn show(&self) -> String {
        if self.0.is_empty() { "none".to_owned() } else { self.0.join(",") }
    }
}

impl Knob for PathBuf {
    const PLACEHOLDER: &'static str = "PATH";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("an empty path names nothing".to_owned());
        }
        Ok(Self::from(text))
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

/// What is said of a word that is none of `words`.
fn no_word(text: &str, words: &[&str]) -> String {
    let hint = nearest(text, words.iter().copied());
    let hint = hint.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
    format!("{text:?} is none of the words {}{hint}", words.join(", "))
}

/// Declares a knob that takes one of a few words.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $(#[doc = $word] $variant,)*
        }

        impl Knob for $name {
            const PLACEHOLDER: &'static str = "WORD";

            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(no_word(text, &[$($word),*])),
                }
            }

            fn show(&self) -> String {
                match self { $(Self::$variant => $word,)* }.to_owned()
            }
        }
    };
}

words! {
    /// What acknowledged data survives.
    DurabilityWord { None = "none", Process = "process", Power = "power", }
}

words! {
    /// What the members of a cluster write to each other through.
    LogProviderWord { Auto = "auto", Shm = "shm", Tcp = "tcp", }
}

words! {
    /// How pipelined requests on keys of different shards relate.
    OrderWord { Strict = "strict", Relaxed = "relaxed", }
}

words! {
    /// How objects come from other nodes.
    MoveWord {
        Auto = "auto",
        TwoSided = "two-sided",
        OneSided = "one-sided",
        Socket = "socket",
        Socket4k = "socket-4k",
    }
}

words! {
    /// What the pool is made of.
    PoolWord { Auto = "auto", Dax = "dax", File = "file", Dram = "dram", }
}

words! {
    /// The instruction that writes lines back.
    WriteBackWord { Auto = "auto", Clwb = "clwb", Clflushopt = "clflushopt", Clflush = "clflush", }
}

impl WriteBackWord {
    /// The instruction; `None` for auto.
    pub fn instruction(self) -> Option<beeline_pmem::WriteBack> {
        match self {
            Self::Auto => None,
            Self::Clwb => Some(beeline_pmem::WriteBack::Clwb),
            Self::Clflushopt => Some(beeline_pmem::WriteBack::Clflushopt),
            Self::Clflush => Some(beeline_pmem::WriteBack::Clflush),
        }
    }
}

words! {
    /// What gives way at the memory limit, in Redis' words.
    EvictionWord {
        NoEviction = "noeviction",
        AllKeysLru = "allkeys-lru",
        AllKeysRandom = "allkeys-random",
        VolatileLru = "volatile-lru",
        VolatileRandom = "volatile-random",
        VolatileTtl = "volatile-ttl",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_size_shows_as_text_that_parses_back(bytes in prop_oneof![any::<u64>(), (0u64..64).prop_map(|s| 1 << s)]) {
            prop_assert_eq!(Size::parse(&Size(bytes).show()), Ok(Size(bytes)));
        }

        #[test]
        fn a_span_shows_as_text_that_parses_back(nanoseconds in any::<u64>()) {
            let span = Span(Duration::from_nanos(nanoseconds));
            prop_assert_eq!(Span::parse(&span.show()), Ok(span));
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in ".{0,40}") {
            let _ = Size::parse(&text);
            let _ = Span::parse(&text);
            let _ = Number::parse(&text);
            let _ = Secret::parse(&text);
        }
    }

    #[test]
    fn sizes_take_units_and_fractions() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64MiB", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("0", 0),
            ("12 KiB", 12288),
            ("1gb", 1 << 30),
            ("1GB", 1 << 30),
            ("100m", 100_000_000),
            ("5K", 5_000),
            ("7b", 7),
        ] {
            assert_eq!(Size::parse(text), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "-1",
            "1MX",
            "1e9",
            "gb",
            "1bb",
            "99999999999999999999",
            "16777217TiB",
            "GiB",
            "1.2.3",
        ] {
            assert!(Size::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn wrong_words_are_answered_with_the_right_ones() {
        let problem = DurabilityWord::parse("strong").unwrap_err();
        assert!(problem.contains("none, process, power"), "{problem}");
        assert!(!problem.contains("did you mean"), "{problem}");
        let problem = DurabilityWord::parse("proces").unwrap_err();
        assert!(problem.ends_with("; did you mean process?"), "{problem}");
        assert!(Threshold::parse("soon").unwrap_err().ends_with("; or off"));
        assert_eq!(Threshold::parse("10ms").unwrap().show(), "10ms");
        assert_eq!(Threshold::parse("off").unwrap().show(), "off");
        assert!(Door::parse("6379").unwrap_err().contains("127.0.0.1:6379"));
        assert!(Window::parse("resource2").unwrap_err().contains("emulated"));
        for window in ["off", "emulated", "/f?side=1"] {
            assert_eq!(Window::parse(window).unwrap().show(), window);
        }
        assert!(Auto::<Number>::parse("x").unwrap_err().ends_with("or auto"));
    }

    #[test]
    fn a_secret_is_never_shown() {
        let secret = Secret::parse("hunter2").unwrap();
        assert!(!format!("{secret:?}{}", secret.show()).contains("hunter2"));
    }
}
