//! The parser against whole, cut, malformed and random input.

use proptest::prelude::*;

use super::*;

/// Every request of `input`, fed in pieces of `step` bytes.
fn parse_all(input: &[u8], step: usize) -> Result<Vec<Vec<Vec<u8>>>, ProtocolError> {
    parse_with(input, step, |_| {})
}

/// As [`parse_all`], with something done at each request.
fn parse_with(
    input: &[u8],
    step: usize,
    mut at_each: impl FnMut(&mut RequestParser),
) -> Result<Vec<Vec<Vec<u8>>>, ProtocolError> {
    let mut parser = RequestParser::new(Limits::default());
    let mut requests = Vec::new();
    for piece in input.chunks(step.max(1)) {
        parser.feed(piece)?;
        while parser.advance()? {
            at_each(&mut parser);
            requests.push(parser.current().from(0).map(<[u8]>::to_vec).collect());
        }
    }
    Ok(requests)
}

proptest! {
    /// Requests read ahead are the requests that are read one by one, in whatever pieces they come and
    /// whenever the parser is asked what is coming.
    #[test]
    fn reading_ahead_changes_nothing(
        pieces in proptest::collection::vec(prop_oneof![
            4 => (0_usize..3, 0_usize..1200).prop_map(|(words, length)| {
                let mut request = format!("*{}\r\n$3\r\nSET\r\n", words + 1).into_bytes();
                for _ in 0..words {
                    request.extend_from_slice(format!("${length}\r\n").as_bytes());
                    request.resize(request.len() + length, b'v');
                    request.extend_from_slice(b"\r\n");
                }
                request
            }),
            1 => Just(b"*0\r\n".to_vec()),
            1 => Just(b"PING \"a b\"\r\n".to_vec()),
            1 => Just(b"*1\r\n$04\r\nPING\r\n".to_vec()),
            1 => proptest::collection::vec(any::<u8>(), 0..6),
        ], 0..24),
        step in 1_usize..3000, every in 1_u32..20,
    ) {
        let input = pieces.concat();
        let mut calls = 0;
        let ahead = parse_with(&input, step, |parser| {
            calls += 1;
            if calls % every == 0 {
                parser.upcoming().count();
            }
        });
        // With fewer arguments allowed than the short way takes, all goes the long way.
        let mut parser = RequestParser::new(Limits { arguments: 8, ..Limits::default() });
        let mut plain = Vec::new();
        let plain = parser.feed(&input).and_then(|()| loop {
            match parser.next_request() {
                Ok(Some(args)) => plain.push(args.from(0).map(<[u8]>::to_vec).collect::<Vec<_>>()),
                Ok(None) => break Ok(plain),
                Err(error) => break Err(error),
            }
        });
        prop_assert_eq!(ahead, plain);
    }
}

fn words(list: &[&str]) -> Vec<Vec<u8>> {
    list.iter().map(|word| word.as_bytes().to_vec()).collect()
}

#[test]
fn pipelined_requests_come_out_one_by_one_however_they_are_cut() {
    let input = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING\r\n*3\r\n$3\r\nSET\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n\r\n*0\r\n*-1\r\n  ECHO \"a b\"\n";
    let expected = vec![
        words(&["GET", "k"]),
        words(&["PING"]),
        words(&["SET", "", "a\r\nbc"]),
        words(&["ECHO", "a b"]),
    ];
    for step in 1..=input.len() {
        assert_eq!(parse_all(input, step), Ok(expected.clone()), "pieces of {step}");
    }
}

#[test]
fn inline_words_are_unquoted_as_redis_does() {
    for (line, expected) in [
        (r#"set k "a\x41\n\"\q" 'it\'s'"#, vec!["set", "k", "aA\n\"q", "it's"]),
        (r#"echo 'a\n'"#, vec!["echo", r"a\n"]),
        ("\tping \x0b ", vec!["ping"]),
        (r#"a"b c""#, vec!["ab c"]),
        (r#"echo """#, vec!["echo", ""]),
        ("ping\0 hidden", vec!["ping"]),
        (r#"echo "\x4" "#, vec!["echo", "x4"]),
    ] {
        let input = format!("{line}\r\n");
        assert_eq!(parse_all(input.as_bytes(), 3), Ok(vec![words(&expected)]), "{line}");
    }
    for line in [r#"echo "a"#, r#"echo "a"b"#, "echo 'a", r"echo 'a'b", r#"echo "a\""#] {
        let input = format!("{line}\r\n");
        assert_eq!(
            parse_all(input.as_bytes(), 1000),
            Err(ProtocolError::UnbalancedQuotes),
            "{line}"
        );
    }
}

#[test]
fn each_malformed_request_gets_the_text_redis_gives() {
    let long = |first: u8| {
        let mut bytes = vec![b'1'; 70_000];
        bytes[0] = first;
        bytes
    };
    let mut long_length = b"*1\r\n".to_vec();
    long_length.extend(long(b'$'));
    for (input, text) in [
        (b"*x\r\n".to_vec(), "Protocol error: invalid multibulk length"),
        (b"*\r\n".to_vec(), "Protocol error: invalid multibulk length"),
        (b"*1048577\r\n".to_vec(), "Protocol error: invalid multibulk length"),
        (b"*01\r\n".to_vec(), "Protocol error: invalid multibulk length"),
        (b"*1\r\n:1\r\n".to_vec(), "Protocol error: expected '$', got ':'"),
        (b"*1\r\n\r\n$".to_vec(), "Protocol error: expected '$', got ' '"),
        (b"*1\r\n$-1\r\n".to_vec(), "Protocol error: invalid bulk length"),
        (b"*1\r\n$536870913\r\n".to_vec(), "Protocol error: invalid bulk length"),
        (b"*1\r\n$9223372036854775808\r\n".to_vec(), "Protocol error: invalid bulk length"),
        (long(b'*'), "Protocol error: too big mbulk count string"),
        (long_length, "Protocol error: too big bulk count string"),
        (long(b'P'), "Protocol error: too big inline request"),
    ] {
        for step in [1, 7, 100_000] {
            let error = parse_all(&input, step).unwrap_err();
            assert_eq!(error.to_string(), text);
            assert!(error.has_reply());
        }
    }
}

#[test]
fn before_authentication_only_small_requests_are_taken() {
    let mut parser = RequestParser::new(Limits::default());
    parser.set_authenticated(false);
    parser.feed(b"*11\r\n").unwrap();
    assert_eq!(parser.next_request().unwrap_err(), ProtocolError::UnauthenticatedCount);
    let mut parser = RequestParser::new(Limits::default());
    parser.set_authenticated(false);
    parser.feed(b"*1\r\n$16385\r\n").unwrap();
    assert_eq!(parser.next_request().unwrap_err(), ProtocolError::UnauthenticatedLength);
}

#[test]
fn an_announced_length_is_not_allocated_for() {
    let mut parser = RequestParser::new(Limits::default());
    parser.feed(b"*1000000\r\n$500000000\r\n").unwrap();
    assert!(parser.next_request().unwrap().is_none());
    parser.feed(b"first bytes").unwrap();
    assert!(parser.next_request().unwrap().is_none());
    assert!(parser.room().len() >= 1024);
    assert!(parser.capacity_bytes() < 64 * 1024, "{}", parser.capacity_bytes());
}

#[test]
fn a_request_beyond_the_query_buffer_limit_ends_the_connection_without_reply() {
    let limits = Limits { query_buffer_bytes: 100_000, ..Limits::default() };
    let mut parser = RequestParser::new(limits);
    parser.feed(b"*1\r\n$200000\r\n").unwrap();
    assert!(parser.next_request().unwrap().is_none());
    let error = parser.feed(&[0; 150_000]).unwrap_err();
    assert_eq!(error, ProtocolError::QueryBufferFull { limit_bytes: 100_000 });
    assert!(!error.has_reply());
}

#[test]
fn a_large_argument_arrives_whole_and_its_memory_can_be_given_back() {
    let value: Vec<u8> = (0..3_000_000_u32).map(|at| at as u8).collect();
    let mut input = format!("*2\r\n$4\r\nECHO\r\n${}\r\n", value.len()).into_bytes();
    input.extend(&value);
    input.extend(b"\r\nPING\r\n");
    let mut parser = RequestParser::new(Limits::default());
    let mut seen = 0;
    for piece in input.chunks(10_000) {
        parser.feed(piece).unwrap();
        while let Some(args) = parser.next_request().unwrap() {
            seen += 1;
            if seen == 1 {
                assert!(args.get(1) == value);
            }
        }
        assert!(parser.capacity_bytes() < 2 * value.len() + 100_000);
    }
    assert_eq!(seen, 2);
    parser.trim();
    assert_eq!(parser.capacity_bytes(), 0);
    parser.feed(b"PING\r\n").unwrap();
    assert_eq!(parser.next_request().unwrap().unwrap().get(0), b"PING");
}

fn encode(requests: &[Vec<Vec<u8>>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for request in requests {
        bytes.extend(format!("*{}\r\n", request.len()).into_bytes());
        for word in request {
            bytes.extend(format!("${}\r\n", word.len()).into_bytes());
            bytes.extend(word);
            bytes.extend(b"\r\n");
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_is_encoded_is_parsed_back(
        requests in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..6), 1..6),
        step in 1_usize..300,
    ) {
        prop_assert_eq!(parse_all(&encode(&requests), step), Ok(requests));
    }

    #[test]
    fn random_bytes_never_panic_nor_take_memory(
        bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        fuzz(&bytes);
    }

    #[test]
    fn mutated_requests_never_panic_nor_take_memory(
        requests in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 1..6), 1..20),
        mutations in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut bytes = encode(&requests);
        for (at, value) in mutations {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fuzz(&bytes);
    }

    #[test]
    fn how_input_is_cut_does_not_change_the_outcome(
        text in "[*$0-9a \"'\r\n]{0,60}", step in 1_usize..10) {
        let whole = parse_all(text.as_bytes(), 1000);
        let cut = parse_all(text.as_bytes(), step);
        prop_assert_eq!(whole, cut);
    }
}

#[test]
fn a_glance_tells_the_first_arguments_of_what_is_complete_and_short() {
    let mut parser = RequestParser::new(Limits::default());
    let long = "v".repeat(120);
    let input = format!(
        "*2\r\n$3\r\nGET\r\n$1\r\na\r\n*3\r\n$3\r\nSET\r\n$2\r\nbb\r\n$120\r\n{long}\r\n*1\r\n$4\r\nPING\r\n\
         *5\r\n$4\r\nMGET\r\n$1\r\nc\r\n$0\r\n\r\n$1\r\ne\r\n$1\r\nf\r\n*2\r\n$3\r\nGET\r\n$1\r\ng\r\n"
    );
    parser.feed(input.as_bytes()).unwrap();
    let told =
        |parser: &mut RequestParser| parser.upcoming().map(|e| e.key.to_vec()).collect::<Vec<_>>();
    // The long request is the last one told of.
    assert_eq!(told(&mut parser), words(&["a", "bb", "", "c"]));
    assert!(parser.advance().unwrap());
    assert_eq!(told(&mut parser), words(&["bb", "", "c"]));
    assert_eq!(parser.current().get(1), b"a");
    for _ in 0..4 {
        assert!(parser.advance().unwrap());
    }
    assert_eq!(told(&mut parser), words(&[]));
    assert_eq!(parser.current().get(1), b"g");
    assert!(!parser.advance().unwrap());
}

#[test]
fn a_glance_tells_the_fields_of_hashes() {
    let mut parser = RequestParser::new(Limits::default());
    let hset = "*4\r\n$4\r\nhset\r\n$1\r\nh\r\n$2\r\nf1\r\n$1\r\nv\r\n";
    let get = "*2\r\n$3\r\nGET\r\n$1\r\na\r\n";
    let hget = "*3\r\n$4\r\nHGET\r\n$1\r\nh\r\n$2\r\nf2\r\n";
    let cut = "*3\r\n$4\r\nHGET\r\n$1\r\nh\r\n$20\r\n$1\r\nx\r\n";
    parser
        .feed(format!("{hset}{get}{hset}{hget}*2\r\n$4\r\nHLEN\r\n$1\r\nh\r\n{cut}").as_bytes())
        .unwrap();
    let (field, plain) = (|field| Expected { key: b"h", field }, Expected::from(&b"a"[..]));
    let told = [field(Some(b"f1")), plain, field(Some(b"f1")), field(Some(b"f2")), field(None)];
    assert_eq!(parser.upcoming().collect::<Vec<_>>(), [&told[..], &[field(None)]].concat());
    for each in told {
        assert!(parser.advance().unwrap());
        assert_eq!(expected(parser.current()), each);
    }
}

proptest! {
    /// Whatever the bytes: what the glance tells is what the parser finds.
    #[test]
    fn a_glance_agrees_with_the_parser(
        pieces in proptest::collection::vec(prop_oneof![
            Just(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n".to_vec()),
            Just(b"*3\r\n$3\r\nSET\r\n$2\r\nkk\r\n$10\r\n0123456789\r\n".to_vec()),
            Just(b"*4\r\n$4\r\nHSET\r\n$1\r\nk\r\n$1\r\nf\r\n$1\r\nv\r\n".to_vec()),
            Just(b"*3\r\n$4\r\nhget\r\n$1\r\nk\r\n$99\r\n$1\r\nx".to_vec()),
            Just(b"*1\r\n$4\r\nPING\r\n".to_vec()),
            Just(b"*0\r\n".to_vec()),
            Just(b"PING\r\n".to_vec()),
            Just(b"*2\r\n$3\r\nGET\r\n$100\r\nshort".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..8),
        ], 0..8),
    ) {
        let mut parser = RequestParser::new(Limits::default());
        prop_assert!(parser.feed(&pieces.concat()).is_ok());
        let told: Vec<(Vec<u8>, Option<Vec<u8>>)> =
            parser.upcoming().map(|e| (e.key.to_vec(), e.field.map(<[u8]>::to_vec))).collect();
        for (index, first) in told.iter().enumerate() {
            match parser.next_request() {
                Ok(Some(args)) => {
                    let found = expected(args);
                    prop_assert_eq!(found.key, &first.0[..]);
                    prop_assert_eq!(found.field, first.1.as_deref());
                }
                // Only the last one told of may lack its end.
                _ => prop_assert_eq!(index + 1, told.len()),
            }
        }
    }
}
