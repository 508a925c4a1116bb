//! The elements that come with the compiler: source files, compiled with the graph that names them.

/// Files by name.
const FILES: &[(&str, &str)] = &[
    ("headers.np", include_str!("../library/headers.np")),
    ("basics.np", include_str!("../library/basics.np")),
    ("parsing.np", include_str!("../library/parsing.np")),
    ("checksum.np", include_str!("../library/checksum.np")),
    ("encap.np", include_str!("../library/encap.np")),
    ("tables.np", include_str!("../library/tables.np")),
    ("scheduling.np", include_str!("../library/scheduling.np")),
    ("firewall.np", include_str!("../library/firewall.np")),
    ("balancer.np", include_str!("../library/balancer.np")),
    ("generator.np", include_str!("../library/generator.np")),
    ("crypto.np", include_str!("../library/crypto.np")),
];

/// The text of a library file.
#[must_use]
pub fn text(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(file, _)| *file == name).map(|(_, text)| *text)
}

/// The file that declares an element.
#[must_use]
pub fn file_of(element: &str) -> Option<&'static str> {
    elements().find(|(name, _)| *name == element).map(|(_, file)| file)
}

/// Every element of the library with its file.
pub fn elements() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().flat_map(|(file, text)| {
        text.lines().filter_map(move |line| {
            let rest = line.strip_prefix(".element ")?;
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            Some((&rest[..end], *file))
        })
    })
}

/// Every file with its text.
pub fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().copied()
}
