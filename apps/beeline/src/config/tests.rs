//! What a person can write, and what is said where it is wrong.

use super::values::{Auto, Door, Size, Switch};
use super::*;

knobs! {
    /// A service's table.
    pub struct Shed, table "shed" {
        memory: Size = "1MiB", "Bytes.";
        open_late: Switch = "off" earlier "late", "Hours.";
    }
}

impl Shed {
    fn check(&self, rules: &mut Rules<'_>) {
        rules.rule("shed-memory", self.memory.0 > 4, "choose more than 4");
    }
}

knobs! {
    /// Two knobs and a service.
    pub struct Small, table "serve" {
        size: Size = "64MiB", "Bytes.";
        http_address: Door = "127.0.0.1:6379", "Where.";
    }
    tables {
        /// The service.
        shed: Shed;
    }
}

impl Small {
    fn check(&self, _: &mut Rules<'_>) {}
}

fn file(text: &str) -> Result<FileLayer, ConfigError> {
    FileLayer::from_text("test.toml".into(), text)
}

fn small(
    flags: &[(&str, &str)],
    text: &str,
    environment: &[(&str, &str)],
) -> Result<(Small, Vec<Row>), ConfigError> {
    let flags =
        flags.iter().fold(ServeFlags::default(), |flags, (name, text)| flags.with(name, *text));
    Small::resolve(&flags, &file(text)?, &Environment::of(environment))
}

fn wrong(flags: &[(&str, &str)], text: &str, environment: &[(&str, &str)]) -> String {
    small(flags, text, environment).map(|_| ()).unwrap_err().to_string()
}

fn origin(rows: &[Row], name: &str) -> String {
    rows.iter().find(|row| row.name == name).unwrap().origin.to_string()
}

fn loaded(flags: &[(&str, &str)], text: &str) -> Result<(ServeConfig, Vec<Row>), ConfigError> {
    let flags =
        flags.iter().fold(ServeFlags::default(), |flags, (name, text)| flags.with(name, *text));
    ServeConfig::load(&flags, &file(text)?, &Environment::default())
}

#[test]
fn a_flag_wins_over_the_environment_which_wins_over_the_file() {
    let text = "[serve]\nsize = \"1KiB\"\nhttp-address = \"off\"";
    let environment = [("BEELINE_SIZE", "2KiB")];
    let (config, rows) = small(&[], text, &environment).unwrap();
    assert_eq!(config.size.0, 2048);
    assert_eq!(config.http_address.0, None);
    assert_eq!(origin(&rows, "size"), "environment BEELINE_SIZE");
    assert_eq!(origin(&rows, "http-address"), "file test.toml:3");
    let (config, rows) = small(&[("size", "3KiB")], text, &environment).unwrap();
    assert_eq!(config.size.0, 3072);
    assert_eq!(origin(&rows, "size"), "flag --size");
}

#[test]
fn a_service_has_a_table_flags_and_variables_of_its_own() {
    let (config, rows) = small(&[], "[shed]\nmemory = \"2KiB\"\nopen-late = true", &[]).unwrap();
    assert!(config.shed.memory.0 == 2048 && config.shed.open_late.0);
    assert_eq!(origin(&rows, "shed-memory"), "file test.toml:2");
    let (config, _) =
        small(&[("shed-memory", "7")], "", &[("BEELINE_SHED_OPEN_LATE", "on")]).unwrap();
    assert!(config.shed.memory.0 == 7 && config.shed.open_late.0);
}

#[test]
fn what_moved_into_a_table_is_read_where_it_stood() {
    let (config, rows) = small(&[], "[serve]\nlate = true", &[]).unwrap();
    assert!(config.shed.open_late.0);
    assert_eq!(origin(&rows, "shed-open-late"), "file test.toml:2");
    let (config, rows) = small(&[], "", &[("BEELINE_LATE", "on")]).unwrap();
    assert!(config.shed.open_late.0);
    assert_eq!(origin(&rows, "shed-open-late"), "environment BEELINE_LATE");
    let twice = wrong(&[], "[serve]\nlate = true\n[shed]\nopen-late = false", &[]);
    assert_eq!(twice, "test.toml:2:1: line 4 says the same setting; keep open-late under [shed]");
    let twice = wrong(&[], "", &[("BEELINE_LATE", "on"), ("BEELINE_SHED_OPEN_LATE", "on")]);
    assert!(twice.contains("are the same setting"), "{twice}");
}

#[test]
fn every_problem_is_reported_with_its_place() {
    let text = "[serve]\nsize = \"many\"\nhttp_address = \"x\"\n  sizes = 3\n[shed]\nopen = 1";
    let said = wrong(&[("shed-memory", "-")], text, &[("BEELINE_HTTP_ADDRESS", "here")]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 6, "{said}");
    assert!(lines[0].starts_with("test.toml:2:1: size: \"many\" is not a size"), "{said}");
    assert!(lines[1].starts_with("BEELINE_HTTP_ADDRESS: "), "{said}");
    assert!(lines[2].starts_with("--shed-memory: "), "{said}");
    let expected = [
        "test.toml:3:1: [serve] has no setting http_address; did you mean http-address?",
        "test.toml:4:3: [serve] has no setting sizes; did you mean size?",
        "test.toml:6:1: [shed] has no setting open; `beeline config show` lists the settings",
    ];
    assert_eq!(lines[3..], expected);
}

#[test]
fn a_setting_in_the_wrong_table_is_told_the_right_one() {
    let said = wrong(&[], "[serve]\nshed-memory = 1\nmemory = 1\n[shed]\nsize = 1", &[]);
    for expected in [
        "test.toml:2:1: [serve] has no setting shed-memory; write memory under [shed]",
        "test.toml:3:1: [serve] has no setting memory; write memory under [shed]",
        "test.toml:5:1: [shed] has no setting size; write size under [serve]",
    ] {
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_misspelt_table_is_told_the_nearest_one() {
    let said = wrong(&[], "[server]\nsize = 1\n\n[garage]\nx = 1", &[]);
    assert_eq!(
        said,
        "test.toml:4:2: there is no table [garage]; the tables are [serve], [shed]\n\
         test.toml:1:2: there is no table [server]; did you mean [serve]?"
    );
}

#[test]
fn a_misspelt_variable_is_told_the_nearest_one() {
    let said =
        wrong(&[], "", &[("BEELINE_SIZES", "1"), ("BEELINE_LOGG", "x"), ("BEELINE_WXYZ", "")]);
    assert_eq!(
        said,
        "BEELINE_LOGG: there is no setting of this name; did you mean BEELINE_LOG?\n\
         BEELINE_SIZES: there is no setting of this name; did you mean BEELINE_SIZE?\n\
         BEELINE_WXYZ: there is no setting of this name; `beeline config show` lists the settings"
    );
    let elsewhere =
        [("BEELINE_LOG", "info"), ("BEELINE_SOCKETS_MONITOR", "x"), ("BEELINE_DEEP", "1")];
    assert!(small(&[], "", &elsewhere).is_ok());
}

#[test]
fn a_broken_file_is_refused_with_its_line_and_column() {
    let at = |text: &str| wrong(&[], text, &[]);
    assert!(
        at("[serve]\nsize = \n").starts_with("test.toml:2:8: "),
        "{}",
        at("[serve]\nsize = \n")
    );
    assert!(at("# ü\n[serve").starts_with("test.toml:2:7: "), "{}", at("# ü\n[serve"));
    assert!(at("[serve]\nsize = 1\nsize = 2").starts_with("test.toml:3:1: "), "twice");
    assert!(at("[serve]\nsize = [1]").starts_with("test.toml:2:1: serve.size is a array"));
    assert!(at("size = 1").starts_with("test.toml:1:1: size stands outside of a table"));
}

#[test]
fn a_broken_rule_is_told_with_the_place_of_the_value() {
    let rule = |flags: &[(&str, &str)], text: &str| {
        let (config, rows) = small(flags, text, &[]).unwrap();
        let mut rules = Rules::new(&rows);
        config.check_all(&mut rules);
        rules.finish().unwrap_err().to_string()
    };
    let text = "\n[shed]\nmemory = 4";
    assert_eq!(rule(&[], text), "test.toml:3: shed-memory: choose more than 4");
    assert_eq!(rule(&[("shed-memory", "1")], text), "shed-memory: choose more than 4");
}

#[test]
fn every_default_parses_and_no_two_settings_share_a_name() {
    let (config, rows) = loaded(&[], "").unwrap();
    assert!(rows.iter().all(|row| row.origin == Origin::Default));
    assert!(matches!(config.shards, Auto::Detect));
    let settings = flags::settings();
    let mut names: Vec<&str> = settings.iter().map(|setting| setting.flag.as_str()).collect();
    names.extend(settings.iter().filter_map(|s| s.earlier.filter(|&earlier| earlier != s.flag)));
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all, "{names:?}");
}

#[test]
fn each_rule_names_the_setting_to_change() {
    let cases: [(&str, &[(&str, &str)]); 12] = [
        ("segment-size", &[("segment-size", "5000")]),
        ("capacity", &[("capacity", "100MiB")]),
        ("shards", &[("shards", "0")]),
        ("spin-us", &[("spin-us", "1000000")]),
        ("resp-max-clients", &[("resp-max-clients", "0")]),
        ("resp-output-buffer-limit", &[("resp-output-buffer-limit", "1")]),
        ("resp-query-buffer-limit", &[("resp-query-buffer-limit", "1")]),
        ("write-delay-ns", &[("write-delay-ns", "150")]),
        ("http-address", &[("http-address", "127.0.0.1:6379")]),
        ("fabric-window", &[("fabric-window", "emulated"), ("fabric-address", "off")]),
        ("durability", &[("pool", "dram"), ("durability", "power")]),
        ("without: there is no service rsp; did you mean resp?", &[("without", "rsp")]),
    ];
    for (setting, flags) in cases {
        let error = loaded(flags, "").expect_err(setting);
        assert!(error.to_string().starts_with(setting), "{error}");
        assert_eq!(error.problems.len(), 1, "{error}");
    }
}

#[test]
fn a_member_listens_where_its_peers_look_for_it_unless_told_otherwise() {
    let text = "[serve]\nnode-id = 2\ncluster = \"00000000000000ff\"\n\
                peers = \"1=10.0.0.1:4790@10.0.0.1:6379,2=10.0.0.2:4791@10.0.0.2:6380\"\n";
    let (config, rows) = loaded(&[], text).unwrap();
    assert_eq!(config.resp.address.show(), "10.0.0.2:6380");
    assert_eq!(config.fabric_address.show(), "10.0.0.2:4791");
    let row = |rows: &[Row], name: &str| {
        let row = rows.iter().find(|row| row.name == name).unwrap();
        (row.value.clone(), row.origin.to_string())
    };
    let by_peers = "setting peers".to_owned();
    assert_eq!(row(&rows, "resp-address"), ("10.0.0.2:6380".into(), by_peers.clone()));
    assert_eq!(row(&rows, "fabric-address"), ("10.0.0.2:4791".into(), by_peers));
    // The default, but said: it is kept.
    let flags = [("resp-address", "127.0.0.1:6379")];
    let (config, rows) = loaded(&flags, text).unwrap();
    assert_eq!(config.resp.address.show(), "127.0.0.1:6379");
    let flag = ("127.0.0.1:6379".to_owned(), "flag --resp-address".to_owned());
    assert_eq!(row(&rows, "resp-address"), flag);
}

#[test]
fn a_service_that_is_left_out_has_no_door() {
    let (config, rows) = loaded(&[("without", "resp")], "").unwrap();
    assert_eq!(config.resp.address.0, None);
    assert_eq!(origin(&rows, "resp-address"), "setting without");
}

/// A variable that a source file names and that is neither a setting nor in `ELSEWHERE` would stop
/// every node that is started while it is set.
#[test]
fn every_variable_that_the_sources_read_is_known() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders: Vec<PathBuf> = [
        "apps",
        "compiler",
        "engines",
        "foundation",
        "substrate",
        "systems",
        "verify",
        "xtask",
        "fuzz",
    ]
    .map(|folder| root.join(folder))
    .into();
    let mut named = std::collections::BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.extend((!path.ends_with("target")).then_some(path));
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.starts_with(root.join("apps/beeline/src/config"))
            {
                let text = std::fs::read_to_string(&path).unwrap();
                for read in ["var(\"", "var_os(\"", "env = \""] {
                    let calls = text.split(read).skip(1);
                    let names = calls.filter_map(|rest| rest.split('"').next());
                    named.extend(
                        names.filter(|name| name.starts_with("BEELINE_")).map(str::to_owned),
                    );
                }
            }
        }
    }
    assert!(named.len() > 10, "{named:?}");
    let pairs: Vec<(&str, &str)> = named.iter().map(|name| (name.as_str(), "1")).collect();
    let said = Resolver::new(
        flags::settings(),
        &ServeFlags::default(),
        &FileLayer::default(),
        &Environment::of(&pairs),
    )
    .finish();
    assert!(said.is_ok(), "add these to ELSEWHERE: {}", said.unwrap_err());
}
