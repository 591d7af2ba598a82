# Completion of finetune in bash 4 or newer.

# Print the arguments of a command: "key=" with its values, or a word without a key. "/" means file names.
_finetune_words() {
    case $1 in
    @SETTINGS@
    esac
}

# Add a candidate for the word up to the cursor. Readline replaces only the part after the last = or :
_finetune_add() {
    COMPREPLY+=("${1#"$replaced_after"}")
}

_finetune_files() {
    local file
    compopt -o filenames 2>/dev/null
    while IFS= read -r file; do
        _finetune_add "$1$file"
    done < <(compgen -f -- "${2:-}")
}

_finetune_values() {
    local key=${word%%=*}= typed=${word#*=} line value
    while IFS= read -r line; do
        [[ $line == "$key"* ]] || continue
        for value in ${line#"$key"}; do
            if [[ $value == / ]]; then
                _finetune_files "$key" "$typed"
            elif [[ $value == "$typed"* ]]; then
                _finetune_add "$key$value"
            fi
        done
    done < <(_finetune_words "$1")
}

# Add keys up to the next dot, so that a long list of keys is shown section by section.
_finetune_keys() {
    local line name rest last=
    while IFS= read -r line; do
        if [[ $line == / ]]; then
            _finetune_files "" "$word"
            continue
        fi
        name=${line%%=*}
        [[ $line == *=* ]] && name+="="
        [[ $name == "$word"* ]] || continue
        rest=${name#"$word"}
        [[ $rest == *.* ]] && name=$word${rest%%.*}.
        [[ $name == "$last" ]] && continue
        last=$name
        [[ $name == *[=.] ]] && compopt -o nospace 2>/dev/null
        _finetune_add "$name"
    done < <(_finetune_words "$1")
}

_finetune() {
    local word=${COMP_LINE:0:COMP_POINT} rest replaced_after sign
    word=${word##*[[:space:]]}
    rest=$word
    for sign in = :; do
        [[ $COMP_WORDBREAKS == *"$sign"* ]] && rest=${rest##*"$sign"}
    done
    replaced_after=${word%"$rest"}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [[ $word == *=* ]]; then
        _finetune_values "${COMP_WORDS[1]}"
    else
        _finetune_keys "${COMP_WORDS[1]}"
    fi
}

complete -F _finetune finetune
